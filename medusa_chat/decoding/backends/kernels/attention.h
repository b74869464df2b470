/* Attention of a pass's rows to the text and to each other. */

#pragma once

#include <stddef.h>

#include "pass.h"

#define BLOCK 16         /* (row, head) pairs that go together */
#define WIDE (2 * LANES) /* keys whose scores are worked out at once */
#define GROUP 32         /* keys whose values tiles mix at once */

/* Some (row, head) pairs that share a key head. Queries are of bf16 where keys and values are; a
   word is a float, or two of bf16 one behind the other. */
typedef struct {
    int row[BLOCK], head[BLOCK], pairs;
    int size, words, keys, width, is_half; /* words: of a key; width: of a row of scores */
    float *q, *turned, *s; /* [pairs, words], scaled, [words, WIDE], [pairs, width] */
    float *near_by;        /* values as floats */
    uint16_t *shares;      /* [width / GROUP, BLOCK, GROUP] of bf16 */
    float *to[BLOCK];      /* what is mixed, [size] each */
    float *whole;          /* [BLOCK], the shares' sums */
} Block;

/* How many of the mask's first columns hide nothing from any row. */
int free_columns(const Pass *pass);

/* Floats that `attend` works in, over so many keys. */
ptrdiff_t attention_size(const Decoder *m, ptrdiff_t keys);

/* Attention of BLOCK pairs that share the key head `kv`, from pair `first` of its rows * groups on:
   qkv [rows, qkv_width] with the keys already in the layer's -> mixed [rows, heads * head_dim]. */
void attend(const Pass *pass, const Layer *layer, const float *qkv, int kv, int first, int free,
            float *scratch, float *mixed);
