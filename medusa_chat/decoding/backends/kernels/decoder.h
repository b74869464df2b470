/* A few rows through a decoder on a CPU: products, norms, rotary attention, gated SiLU. In fp32, or
   with weights of bf16, where what is multiplied with them is rounded to bf16 and all else is fp32.

   Every number is summed in one order, whatever rows stand beside it: products along their inputs
   in eight lanes, attention along the text. A row of a tree therefore has the bits that it has
   alone, and a tree decodes to plain decoding's tokens, bit for bit. Weights are read where torch
   holds them. Plain C with vectors of GCC and Clang; no library but libm.

   The structures that Python fills, here, in heads.c and in judge.c, have their twins in
   native/structs.py. */

#pragma once

#include <stdint.h>

#include "compiler.h"

/* What one layer reads; keys and values [kv_heads, capacity, head_dim]. */
typedef struct {
    const float *before, *qkv_bias, *out_bias, *after, *gate_up_bias, *down_bias;
    const void *qkv, *out, *gate_up, *down; /* panels */
    float *keys, *values;
} Layer;

/* What all layers share; cosines and sines [capacity, head_dim]. is_half: panels and embeddings are
   of bf16. */
typedef struct {
    int64_t count, hidden, heads, kv_heads, head_dim, inner, capacity, vocabulary, is_half;
    float epsilon, scaling;
    const void *embedding;
    const float *norm, *cosines, *sines;
    const Layer *layers;
} Decoder;

/* One pass: rows behind `start` tokens of the text. mask [rows, start + rows - free], `stride` a
   row: of the columns from `free` on; those before hide nothing from any row. */
typedef struct {
    const Decoder *decoder;
    const int64_t *tokens, *positions;
    const float *mask;
    int64_t stride, free, rows, start, threads;
    float *hidden; /* [rows, hidden], out */
    float *work;
} Pass;

/* One part of a pass, for a team: hidden is whole once all have met, and normed by part 0. */
void decode(const void *what, int part, int parts);

/* Whether every row lies within the embeddings and the cache. */
int is_within(const Pass *pass);

/* Of a row of queries, keys and values side by side. */
INLINE int qkv_width(const Decoder *m) {
    return (int)((m->heads + 2 * m->kv_heads) * m->head_dim);
}
