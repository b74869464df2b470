#pragma once

#include <stdint.h>

#include "growth.h"

/* A draft from one position: heads of residual layers, x + silu(W x + b), layer after layer; the LM
   head they share; of each head's logits the `width` largest, which fill a tree. */
typedef struct {
    const void *panels;     /* [layers, heads] times those of [hidden, hidden] */
    const void *lm_panels;  /* NULL: only the states are wanted */
    const float *bias;      /* [layers, heads, hidden] */
    const float *lm_bias;   /* or NULL */
    const int64_t *names;   /* [size]: the token of each of its rows; NULL: its place */
    const float *hidden;    /* [hidden] */
    float *states, *logits; /* [used, hidden] and as many to work in; [used, size] */
    float *values, *sums;   /* [used, width], [used]: log(sum(exp)) of all logits */
    int64_t *places;        /* [used, width] */
    const int64_t *index;   /* [nodes]: 0 the root, else 1 + a place among the guesses */
    int64_t *tokens;        /* [nodes] */
    float *shares;          /* [nodes]: the heads' probabilities, NaN for the root */
    Growth *growth;         /* what of these nodes is drafted; NULL: all */
    int64_t layers, heads, used, hidden_size, size, width, nodes, root, threads;
    int64_t is_half;        /* panels are of bf16 */
} Proposal;

/* One part of a draft, for a team; who reads its tokens meets the others first. */
void propose_part(const void *what, int part, int parts);
