#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "logits.h"
#include "product.h"
#include "team.h"
#include "vectors.h"

#define MOST_HIDDEN 16384

/* A draft from one position: heads of residual layers, x + silu(W x + b), layer after layer; the LM
   head they share; of each head's logits the `width` largest, which fill a tree. */
typedef struct {
    const float *panels;              /* [layers, heads, hidden / 8, hidden, 8] */
    const float *bias;                /* [layers, heads, hidden] */
    const float *lm_panels, *lm_bias; /* NULL: only the states are wanted */
    const float *hidden;              /* [hidden] */
    float *states, *logits;           /* [used, hidden], [used, size] */
    float *values, *sums;             /* [used, width], [used]: log(sum(exp)) of all logits */
    int64_t *places;                  /* [used, width] */
    const int64_t *index;             /* [nodes]: 0 the root, else 1 + a place among the guesses */
    int64_t *tokens;                  /* [nodes] */
    float *shares;                    /* [nodes]: the heads' probabilities, NaN for the root */
    int64_t layers, heads, used, hidden_size, size, width, nodes, root, threads;
} Proposal;

static void residual(const Proposal *h, int k) {
    const int size = (int)h->hidden_size;
    float wide[MOST_HIDDEN], *x = h->states + (ptrdiff_t)k * size;
    memcpy(x, h->hidden, sizeof(float) * size);
    for (int l = 0; l < h->layers; l++) {
        const ptrdiff_t at = l * h->heads + k;
        const float *panels = h->panels + at * size * size, *bias = h->bias + at * size;
        const Product p = {x, panels, bias, wide, 1, size, size, 0};
        multiply(&p, 0, size / LANES);
        for (int d = 0; d < size; d += LANES) {
            vec y = load(wide + d);
            store(x + d, load(x + d) + y / (1.0f + exponential(-y)));
        }
    }
}

static void propose_part(const void *what, int part, int parts) {
    const Proposal *h = what;
    const int size = (int)h->size, width = (int)h->width;
    for (int k = part; h->states && k < h->used; k += parts) residual(h, k);
    if (h->lm_panels) {
        const Product lm = {h->states, h->lm_panels, h->lm_bias, h->logits, (int)h->used,
                            (int)h->hidden_size, size, 0};
        meet(parts);
        share(&lm, 0, (size + LANES - 1) / LANES, part, parts);
        meet(parts);
    }
    if (!h->values) return;
    for (int k = part; k < h->used; k += parts) {
        const float *x = h->logits + (ptrdiff_t)k * size;
        const ptrdiff_t at = (ptrdiff_t)k * width;
        find_best(x, size, width, h->values + at, h->places + at);
        h->sums[k] = log_sum(x, size, 1.0f, NULL);
    }
    if (!h->tokens) return;
    meet(parts);
    for (int i = 0; part == 0 && i < h->nodes; i++) {
        const int64_t at = h->index[i] - 1;
        h->tokens[i] = at < 0 ? h->root : h->places[at];
        h->shares[i] = at < 0 ? NAN : expf(h->values[at] - h->sums[at / width]);
    }
}

EXPORT void propose(const Proposal *h) { together(propose_part, h, (int)h->threads); }
