/* A pass of rows through a decoder: what it reads and where it writes. The structures that Python
   fills, here, in heads.h and in product.h, have their twins in native_library.py. */

#pragma once

#include <stddef.h>
#include <stdint.h>

#include "compiler.h"
#include "weights.h"

/* A linear; without weights (panels NULL) there is none. */
typedef struct {
    Weights weights;
    const float *bias;
} Linear;

/* What multiplies `up` in a layer. GELU: its approximation by tanh. CLAMPED: gate / (1 + e^(-alpha
   gate)) times up + 1, of gates up to `limit` and ups within it. */
enum { SILU, GELU, CLAMPED };

/* A layer's experts, where count is not 0: its gate, up and down are then those of all of them, one
   behind the other, each in whole panels, and so are their biases. A row passes through the `chosen`
   ones that the router scores highest, which count by their shares of e^score among all experts, or
   (is_normed) among the chosen ones. */
typedef struct {
    Linear router;
    int64_t count, chosen, is_normed;
} Experts;

/* One layer, by what it computes: normed input -> queries, keys, values -> out; normed -> gate * up
   -> down; both sums go to the residual, times `residual`. Norms [hidden], those of heads [head_dim];
   NULL: none there. mixed and fed are of what attention and the gated products add.
   beside: the norm of the token's embedding, which then stands before the normed residual in the
   input of queries, keys and values, as wide again.
   cosines and sines [capacity, rotary], of the first numbers of a head: those behind are not turned.
   growth [capacity]: factors of queries by position, or NULL.
   keys and values [kv_heads, capacity, head_dim], of several texts [texts, kv_heads, capacity,
   head_dim], of bf16 where the decoder says so.
   sinks [heads]: scores beside those of the keys, which take their share and add nothing, or NULL.
   window: positions that a row sees, its own included; 0: all. cap: scores become cap * tanh(score /
   cap); 0: they stay.
   Without a value linear, keys before their norm are the values; without a key linear, too, keys and
   values are those of a layer before, and none are written.
   own_gate and own_out, where the decoder has own inputs: own_out(gate of own_gate(residual) * the
   layer's input of the token) goes to the residual, normed by own_norm. In the end the residual is
   multiplied by `scale`. */
typedef struct {
    const float *before, *beside, *mixed, *after, *fed, *query_norm, *key_norm, *value_norm, *own_norm;
    const float *cosines, *sines, *growth;
    Linear query, key, value, out, gate, up, down, own_gate, own_out;
    Experts experts;
    const float *sinks;
    void *keys, *values;
    int64_t heads, kv_heads, head_dim, rotary, inner, window, gates;
    float scaling, cap, residual, alpha, limit, scale;
} Layer;

/* What each layer reads of a token beside the residual, `width` numbers; 0: nothing. They are those of
   the token's row of a table [vocabulary, layers * width] of its own, times `factor`, and of the
   projection of its embedding, normed by layer, and their sum is multiplied by half of the root of two.
   embedding: see Decoder. */
typedef struct {
    const void *embedding;
    Weights table;
    Linear projection;
    const float *norm;
    int64_t width;
    float factor;
} OwnInputs;

/* What all layers share. is_half: keys and values are of bf16, and so is embedding [vocabulary,
   hidden], where it is not NULL: else its rows are those of table. They are multiplied by
   embedding_scale. */
typedef struct {
    int64_t count, hidden, capacity, vocabulary, is_half;
    float epsilon, embedding_scale;
    const void *embedding;
    Weights table;
    const float *norm;
    const Layer *layers;
    OwnInputs own;
} Decoder;

/* One pass: rows behind `start` tokens of the text, of which none sees more than `keys`. mask [rows,
   rows], `stride` a row: what is added to the scores of the rows for each other; none sees one
   behind it. The text before them is seen but for what lies outside of a layer's window, which goes
   by positions.
   texts [rows], where it is not NULL: every row is the next one of a text of its own, which has as
   many tokens as its position tells; start, mask and stride are not read.
   states [rows, hidden], where it is not NULL: what stands in place of the embeddings; those are
   still read for layers that take them beside it.
   taps [tap_count]: numbers of layers whose residual is written to tapped [rows, tap_count, hidden],
   as it is behind the layer. */
typedef struct {
    const Decoder *decoder;
    const int64_t *tokens, *positions, *texts, *taps;
    const float *mask, *states;
    int64_t stride, rows, start, keys, tap_count, threads;
    float *hidden; /* [rows, hidden], out */
    float *tapped;
    float *work;
} Pass;

INLINE int has(const Linear *linear) { return linear->weights.panels != NULL; }

INLINE int query_width(const Layer *layer) { return (int)(layer->heads * layer->head_dim); }
INLINE int key_width(const Layer *layer) { return (int)(layer->kv_heads * layer->head_dim); }
