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
        const float *panels = h->panels + at * size * size, *bias = h->bias + at * size;
        const Product p = {x, panels, bias, wide, 1, size, size, 0};
        multiply(&p, 0, size / LANES);
        for (int d = 0; d < size; d += LANES) {
            vec y = load(wide + d);
            store(x + d, load(x + d) + y / (1.0f + exponential(-y)));
        }
    }
}

void propose_part(const void *what, int part, int parts) {
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
        const int64_t at = h->index[i] - 1, row = at < 0 ? 0 : h->places[at];
        h->tokens[i] = at < 0 ? h->root : h->names ? h->names[row] : row;
        h->shares[i] = at < 0 ? NAN : expf(h->values[at] - h->sums[at / width]);
    }
}

EXPORT void propose(const Proposal *h) { together(propose_part, h, (int)h->threads); }
