#include "growth.h"

#include "compiler.h"

#define MOST_NODES 1024

/* No node is worth more than its parent, so that the best ones are a tree; of equals the first. */
EXPORT void grow(Growth *g, const float *shares) {
    double worth[MOST_NODES], sum = 1.0, most = 1.0 - g->rate * g->seconds[0];
    int64_t own[MOST_NODES]; /* its place among the best, -1 for none yet */
    const int64_t nodes = g->nodes < MOST_NODES ? g->nodes : MOST_NODES;
    worth[0] = 1.0;
    for (int64_t i = 1; shares && i < nodes; i++)
        worth[i] = worth[g->parents[i]] * (double)shares[i];
    g->count = 1, g->deepest = 0;
    for (int64_t i = 0; i < nodes; i++) own[i] = i ? -1 : 0;
    for (int64_t n = 1; shares && n < g->most && n < nodes; n++) {
        int64_t best = 0;
        for (int64_t i = 1; i < nodes; i++)
            if (own[i] < 0 && (!best || worth[i] > worth[best])) best = i;
        own[best] = n, sum += worth[best];
        const double value = sum - g->rate * g->seconds[n];
        if (value > most) most = value, g->count = n + 1;
    }
    int64_t at = 0;
    for (int64_t i = 0; i < nodes; i++) {
        const int is_chosen = own[i] >= 0 && own[i] < g->count;
        own[i] = is_chosen ? at : -1;
        if (is_chosen) g->chosen[at++] = i;
    }
    for (int64_t j = 0; j < g->count; j++) {
        const int64_t i = g->chosen[j];
        g->own_parents[j] = i ? own[g->parents[i]] : 0;
        g->own_depths[j] = g->depths[i];
        if (g->depths[i] > g->deepest) g->deepest = g->depths[i];
        for (int64_t k = 0; k < g->count; k++)
            g->own_mask[j * g->stride + k] = g->mask[i * g->nodes + g->chosen[k]];
    }
}
