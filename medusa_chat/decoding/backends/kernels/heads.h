#pragma once

#include <stdint.h>

/* The states of heads at one position: residual layers, x + silu(W x + b), layer after layer; the
   first one's input is hidden, or hidden + R root for heads that read the root. */
typedef struct {
    const void *panels;  /* [layers, heads] times those of [size, size] */
    const float *bias;   /* [layers, heads, size] */
    const float *hidden; /* [size] */
    float *states;       /* [used, size], out, and as many to work in */
    int64_t layers, heads, used, size;
    int64_t is_half; /* panels are of bf16 */
    const void *root_panels; /* [heads] times those of [size, size], or NULL */
    const float *root;       /* [size] */
} HeadStates;
