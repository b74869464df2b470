#include "heads.h"

#include <stddef.h>
#include <string.h>

#include "product.h"
#include "team.h"
#include "vectors.h"

#define MOST_HIDDEN 16384

/* Outputs from panel `at` to `end` of one head's layer: y = x + silu(W x + b). */
static void add_layer(const HeadStates *h, int layer, int head, const float *x, float *y, int at,
                      int end) {
    const int size = (int)h->size, half = (int)h->is_half, last = least(PANEL * end, size);
    const ptrdiff_t number = (ptrdiff_t)layer * h->heads + head;
    const ptrdiff_t whole = (ptrdiff_t)PANEL * ((size + PANEL - 1) / PANEL) * size;
    const char *panels = (const char *)h->panels;
    panels += number * whole * (ptrdiff_t)(half ? sizeof(uint16_t) : sizeof(float));
    float wide[MOST_HIDDEN];
    const Product p = {x, panels, h->bias + number * size, wide, 1, size, size, 0, half};
    const Product q = ready(&p);
    multiply(&q, at, end);
    for (int d = PANEL * at; d < last; d += LANES) {
        const vec z = load(wide + d);
        store(y + d, load(x + d) + z / (1.0f + exponential(-z)));
    }
}

/* Every part has its panels of all heads, layer by layer. */
static void add_layers(const void *what, int part, int parts) {
    const HeadStates *h = what;
    const int size = (int)h->size, panels = (size + PANEL - 1) / PANEL, layers = (int)h->layers;
    const int used = (int)h->used, count = used * panels;
    const int mine = first(count, part, parts), end = first(count, part + 1, parts);
    float *const states[2] = {h->states, h->states + (ptrdiff_t)used * size};
    for (int k = 0; !layers && part == 0 && k < used; k++)
        memcpy(h->states + (ptrdiff_t)k * size, h->hidden, sizeof(float) * (size_t)size);
    for (int l = 0; l < layers; l++) {
        const int target = (layers - 1 - l) % 2; /* the last layer's are the states */
        if (l) meet(part, parts);
        for (int k = 0; k < used; k++) {
            const int base = k * panels, at = mine > base ? mine - base : 0;
            const int stop = least(end - base, panels);
            const float *x = l ? states[!target] + (ptrdiff_t)k * size : h->hidden;
            if (at < stop) add_layer(h, l, k, x, states[target] + (ptrdiff_t)k * size, at, stop);
        }
    }
}

EXPORT void head_states(const HeadStates *h, int64_t threads) {
    together(add_layers, h, (int)threads);
}
