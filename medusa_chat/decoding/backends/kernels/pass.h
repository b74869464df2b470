/* A pass of rows through a decoder: what it reads and where it writes. The structures that Python
   fills, here, in heads.h and in product.h, have their twins in native/structs.py. */

#pragma once

#include <stdint.h>

#include "compiler.h"
#include "weights.h"

/* What one layer reads; keys and values [kv_heads, capacity, head_dim], of several texts [texts,
   kv_heads, capacity, head_dim], of bf16 where embeddings are. */
typedef struct {
    const float *before, *qkv_bias, *out_bias, *after, *gate_up_bias, *down_bias;
    Weights query, key, value, out, gate, up, down;
    void *keys, *values;
} Layer;

/* What all layers share; cosines and sines [capacity, rotary], of the first numbers of a head: those
   behind are not turned. is_half: embeddings are of bf16. */
typedef struct {
    int64_t count, hidden, heads, kv_heads, head_dim, rotary, inner, capacity, vocabulary, is_half;
    float epsilon, scaling;
    const void *embedding;
    const float *norm, *cosines, *sines;
    const Layer *layers;
} Decoder;

/* One pass: rows behind `start` tokens of the text, of which none sees more than `keys`. mask [rows,
   start + rows - free], `stride` a row: of the columns from `free` on; those before hide nothing
   from any row.
   texts [rows], where it is not NULL: every row is the next one of a text of its own, which has as
   many tokens as its position tells; start, mask, stride and free are not read. */
typedef struct {
    const Decoder *decoder;
    const int64_t *tokens, *positions, *texts;
    const float *mask;
    int64_t stride, free, rows, start, keys, threads;
    float *hidden; /* [rows, hidden], out */
    float *work;
} Pass;

/* Of a row of queries, keys and values side by side. */
INLINE int qkv_width(const Decoder *m) {
    return (int)((m->heads + 2 * m->kv_heads) * m->head_dim);
}
