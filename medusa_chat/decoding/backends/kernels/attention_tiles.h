/* Attention by AMX tiles, over keys and values of bf16. */

#pragma once

#include "attention.h"

/* Whether blocks run by tiles here. It does not depend on their rows. */
int takes_tiles(const Decoder *m, const Layer *layer);

/* The scores of all keys. */
void score_by_tiles(const Block *b, const void *keys);

/* What whole groups of keys from the text's first on add, for each pair those that lie REACH or
   more before its row; their shares become 0 from the key on that is returned, where `mix` goes
   on. */
int mix_by_tiles(const Block *b, const Pass *pass, const void *values);
