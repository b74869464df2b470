#pragma once

#include <stdint.h>

#include "product.h"
#include "rows.h"
#include "weights.h"

/* The states of heads at one position: residual layers, x + silu(W x + b), layer after layer; the
   first one's input is hidden, or hidden + R root for heads that read the root. */
typedef struct {
    Weights weights, roots; /* of [size, size] each: [layers, heads], and [heads] or NULL */
    const float *bias;      /* [layers, heads, size] */
    const float *hidden;    /* [size] */
    float *states;          /* [used, size], out, and as many to work in */
    int64_t layers, heads, used, size;
    const float *root;      /* [size] */
} HeadStates;

/* The best guesses of heads: their states, an LM head of the shortlist, and of its rows of logits
   the largest, whose places become tokens by `names`. */
typedef struct {
    HeadStates states;
    Product logits;
    Guesses guesses;
    const int64_t *names;
} HeadGuesses;
