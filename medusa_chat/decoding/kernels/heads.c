#include "heads.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "logits.h"
#include "product.h"
#include "team.h"
#include "vectors.h"

#define MOST_HIDDEN 16384

static void residual(const Proposal *h, int k) {
    const int size = (int)h->hidden_size;
    float wide[MOST_HIDDEN], *x = h->states + (ptrdiff_t)k * size;
    memcpy(x, h->hidden, sizeof(float) * size);
    for (int l = 0; l < h->layers; l++) {
        const ptrdiff_t at = l * h->heads + k;
        const int half = (int)h->is_half, width = half ? sizeof(uint16_t) : sizeof(float);
        const ptrdiff_t whole = (ptrdiff_t)PANEL * ((size + PANEL - 1) / PANEL) * size;
        const char *panels = (const char *)h->panels + at * whole * width;
        const Product p = {x, panels, h->bias + at * size, wide, 1, size, size, 0, half};
        share(&p, 0, 1);
        for (int d = 0; d < size; d += LANES) {
            vec y = load(wide + d);
            store(x + d, load(x + d) + y / (1.0f + exponential(-y)));
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

/* The tokens of all nodes, and what of them is drafted. */
static void fill(const Proposal *h) {
    Growth *g = h->growth;
    const int is_alone = g && g->asked < h->used;
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
    for (int k = part; h->states && k < early; k += parts) residual(h, k);
    if (has_gate) {
        guess(h, 0, 1, part, parts);
        meet(part, parts);
        if (expf(h->values[0] - h->sums[0]) < (float)h->growth->gate) {
            if (part == 0) h->growth->asked = 1, fill(h);
            return;
        }
        for (int k = early + part; k < used; k += parts) residual(h, k);
    }
    guess(h, has_gate, used, part, parts);
    if (!h->tokens) return;
    meet(part, parts);
    if (part) return;
    if (h->growth) h->growth->asked = used;
    fill(h);
}

EXPORT void propose(const Proposal *h) { together(propose_part, h, (int)h->threads); }
