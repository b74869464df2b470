#pragma once

#include <stdint.h>

/* A draft's own tree: of the nodes of a larger one those whose probabilities, multiplied along
   their paths, promise the most tokens, as many as are worth their seconds at `rate` tokens a
   second. Its Python twin is dynamic_tree.py. */
typedef struct {
    const int64_t *parents, *depths; /* [nodes] of the larger tree, parents before children */
    const float *mask;               /* [nodes, nodes], additive */
    const double *seconds;           /* [most]: of a step of 1, 2, ... nodes */
    double rate, gate;               /* gate: where the first head's best guess is less probable,
                                        the others are not asked and nothing is drafted */
    int64_t nodes, most;
    int64_t *chosen;                   /* [most], out: nodes, rising */
    int64_t *own_parents, *own_depths; /* [most], out */
    float *own_mask;                   /* [most, most], out */
    int64_t stride;                    /* of a row of own_mask */
    int64_t count, deepest, asked;     /* out; asked: how many heads were */
} Growth;

/* From the probability of every node after its parent, shares [nodes]; NULL: the root alone. */
void grow(Growth *g, const float *shares);
