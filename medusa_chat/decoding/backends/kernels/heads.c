#include "heads.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "logits.h"
#include "product.h"
#include "team.h"
#include "vectors.h"

#define MOST_HIDDEN 16384

/* Outputs from panel `at` to `end` of one head's layer: y = x + silu(W x + b). */
static void add_layer(const Proposal *h, int layer, int head, const float *x, float *y, int at,
                      int end) {
    const int size = (int)h->hidden_size, half = (int)h->is_half, last = least(PANEL * end, size);
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

/* The states of heads `from` to `to`: every part has its panels of all of them, layer by layer, and
   who reads the states meets the others first. */
static void residual(const Proposal *h, int from, int to, int part, int parts) {
    const int size = (int)h->hidden_size, panels = (size + PANEL - 1) / PANEL;
    const int count = (to - from) * panels, layers = (int)h->layers;
    const int mine = first(count, part, parts), end = first(count, part + 1, parts);
    float *const states[2] = {h->states, h->states + h->used * size};
    for (int k = from; !layers && part == 0 && k < to; k++)
        memcpy(h->states + (ptrdiff_t)k * size, h->hidden, sizeof(float) * (size_t)size);
    for (int l = 0; l < layers; l++) {
        const int target = (layers - 1 - l) % 2; /* the last layer's are the states */
        if (l) meet(part, parts);
        for (int k = from; k < to; k++) {
            const int base = (k - from) * panels, at = mine > base ? mine - base : 0;
            const int stop = least(end - base, panels);
            const float *x = l ? states[!target] + (ptrdiff_t)k * size : h->hidden;
            if (at < stop) add_layer(h, l, k, x, states[target] + (ptrdiff_t)k * size, at, stop);
        }
    }
}

/* Heads `from` to `to`, for a team: their states are there, and their best guesses then. */
static void guess(const Proposal *h, int from, int to, int part, int parts) {
    const int size = (int)h->size, width = (int)h->width, hidden = (int)h->hidden_size;
    if (h->lm_panels) {
        const float *states = h->states + (ptrdiff_t)from * hidden;
        float *logits = h->logits + (ptrdiff_t)from * size;
        const int rows = to - from, half = (int)h->is_half;
        const Product lm = {
            states, h->lm_panels, h->lm_bias, logits, rows, hidden, size, 0, half};
        meet(part, parts);
        share(&lm, part, parts);
        meet(part, parts);
    }
    for (int k = from + part; h->values && k < to; k += parts) {
        const float *x = h->logits + (ptrdiff_t)k * size;
        const ptrdiff_t at = (ptrdiff_t)k * width;
        find_best(x, size, width, h->values + at, h->places + at);
        h->sums[k] = log_sum(x, size, 1.0f, NULL);
    }
}

/* The tokens of all nodes, and what of them is drafted; of a gate that is shut the root. */
static void fill(const Proposal *h, int is_alone) {
    Growth *g = h->growth;
    for (int i = 0; i < (is_alone ? 1 : h->nodes); i++) {
        const int64_t at = h->index[i] - 1, row = at < 0 ? 0 : h->places[at];
        h->tokens[i] = at < 0 ? h->root : h->names ? h->names[row] : row;
        h->shares[i] = at < 0 ? NAN : expf(h->values[at] - h->sums[at / h->width]);
    }
    if (!g) return;
    grow(g, is_alone ? NULL : h->shares);
    for (int64_t j = 0; j < g->count; j++)
        h->tokens[j] = h->tokens[g->chosen[j]], h->shares[j] = h->shares[g->chosen[j]];
}

void propose_part(const void *what, int part, int parts) {
    const Proposal *h = what;
    const int used = (int)h->used, has_gate = h->growth && h->growth->gate > 0;
    const int early = has_gate ? 1 : used; /* the others may not be asked */
    if (h->states) residual(h, 0, early, part, parts);
    if (has_gate) {
        guess(h, 0, 1, part, parts);
        meet(part, parts);
        if (expf(h->values[0] - h->sums[0]) < (float)h->growth->gate) {
            if (part == 0) h->growth->asked = 1, fill(h, 1);
            return;
        }
        residual(h, early, used, part, parts);
    }
    guess(h, has_gate, used, part, parts);
    if (!h->tokens) return;
    meet(part, parts);
    if (part) return;
    if (h->growth) h->growth->asked = used;
    fill(h, 0);
}

EXPORT void propose(const Proposal *h) { together(propose_part, h, (int)h->threads); }
