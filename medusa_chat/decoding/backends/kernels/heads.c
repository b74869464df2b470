#include "heads.h"

#include <stddef.h>
#include <string.h>

#include "product.h"
#include "team.h"
#include "vectors.h"

#define MOST_HIDDEN 16384

/* Outputs from panel `at` to `end` of one head's stage: y = x + silu(W x + b) of a layer, x + R root
   before the first one (layer -1). */
static void add(const HeadStates *h, int layer, int head, const float *x, float *y, int at, int end) {
    const int size = (int)h->size, last = least(PANEL * end, size), is_root = layer < 0;
    const ptrdiff_t number = is_root ? head : (ptrdiff_t)layer * h->heads + head;
    const ptrdiff_t panels = number * ((size + PANEL - 1) / PANEL);
    Weights w = is_root ? h->roots : h->weights;
    w.panels = (const char *)w.panels + panels * panel_size(&w, size);
    float wide[MOST_HIDDEN];
    const Product product = {.x = is_root ? h->root : x,
                             .weights = w,
                             .bias = is_root ? NULL : h->bias + number * size,
                             .y = wide,
                             .rows = 1,
                             .ins = size,
                             .outs = size};
    const Product q = ready(&product);
    multiply(&q, at, end);
    for (int d = PANEL * at; d < last; d += LANES) {
        const vec z = load(wide + d);
        store(y + d, load(x + d) + (is_root ? z : z / (1.0f + exponential(-z))));
    }
}

/* Every part has its panels of all heads, stage by stage: the root's, where it is read, and the
   layers. */
static void add_layers(const void *what, int part, int parts) {
    const HeadStates *h = what;
    const int size = (int)h->size, panels = (size + PANEL - 1) / PANEL;
    const int reads = h->roots.panels != NULL, stages = (int)h->layers + reads;
    const int used = (int)h->used, count = used * panels;
    const int mine = first(count, part, parts), end = first(count, part + 1, parts);
    float *const states[2] = {h->states, h->states + (ptrdiff_t)used * size};
    for (int k = 0; !stages && part == 0 && k < used; k++)
        memcpy(h->states + (ptrdiff_t)k * size, h->hidden, sizeof(float) * (size_t)size);
    for (int s = 0; s < stages; s++) {
        const int target = (stages - 1 - s) % 2; /* the last one's are the states */
        if (s) meet(part, parts);
        for (int k = 0; k < used; k++) {
            const int base = k * panels, at = mine > base ? mine - base : 0;
            const int stop = least(end - base, panels);
            const float *x = s ? states[!target] + (ptrdiff_t)k * size : h->hidden;
            float *y = states[target] + (ptrdiff_t)k * size;
            if (at < stop) add(h, s - reads, k, x, y, at, stop);
        }
    }
}

EXPORT void head_states(const HeadStates *h, int64_t threads) {
    together(add_layers, h, (int)threads);
}

static void guess(const void *what, int part, int parts) {
    const HeadGuesses *h = what;
    const Guesses *g = &h->guesses;
    add_layers(&h->states, part, parts);
    meet(part, parts);
    share(&h->logits, part, parts);
    meet(part, parts);
    guess_part(g, part, parts);
    for (int64_t i = part; i < g->rows; i += parts)
        for (int64_t k = i * g->count; k < (i + 1) * g->count; k++)
            g->places[k] = h->names[g->places[k]];
}

EXPORT void head_guesses(const HeadGuesses *h, int64_t threads) {
    together(guess, h, (int)threads);
}
