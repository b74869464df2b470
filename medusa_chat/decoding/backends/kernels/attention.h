/* Attention of a pass's rows to the text and to each other. */

#pragma once

#include <stddef.h>

#include "pass.h"

#define BLOCK 16         /* (row, head) pairs that go together */
#define KEYS (2 * WIDTH) /* whose scores are worked out at once */
#define GROUP 32         /* keys whose values tiles mix at once */

/* The attention of BLOCK pairs that share the key head `kv`, from pair `first` of its rows * groups
   on: queries [rows, heads * head_dim], keys already in the layer's -> mixed, as wide. */
typedef struct {
    Pass pass;
    Layer layer;
    const float *queries;
    float *mixed;
    int kv, first;
} Attention;

/* Some (row, head) pairs that share a key head. Queries are of bf16 where keys and values are; a
   word is a float, or two of bf16 one behind the other. Of the text only the keys from place `from`
   on are read, which is the start of a group: no pair sees one before it. */
typedef struct {
    int row[BLOCK], head[BLOCK], pairs;
    int from, size, words, keys, width, is_half; /* words: of a key; width: of a row of scores */
    float *q, *turned, *s; /* [pairs, words], scaled, [words, KEYS], [pairs, width] */
    float *near_by;        /* values as floats */
    uint16_t *shares;      /* [width / GROUP, BLOCK, GROUP] of bf16 */
    float *to[BLOCK];      /* what is mixed, [dims] each */
    int dims, stride;      /* of a value; floats from one value to the next */
    float *whole;          /* [BLOCK], the shares' sums */
} Block;

/* Floats that `attend` works in over so many keys; those of a block's scores. */
ptrdiff_t attention_size(const Decoder *m, const Layer *layer, ptrdiff_t keys);
ptrdiff_t scores_size(ptrdiff_t keys);

void attend(const Attention *a, float *scratch);

/* The same in STEPS steps: a part scores its share of the keys, weighs its share of the pairs and
   mixes its share of the dimensions, so that no sum is split. Nobody begins a step before all have
   done the one before. scores: everybody's, scratch: the part's own. Not where `takes_tiles`. */
enum { TO_SCORES, TO_SHARES, TO_MIX, STEPS };
void attend_step(const Attention *a, int step, float *scores, float *scratch, int part, int parts);
