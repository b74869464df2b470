/* A group of keys is added in one go by a tile, not key by key along the text. So that a row of a
   tree has the bits that it has alone, groups lie at the same places of the text for every row, and
   end so far before it that none reaches the tree, where what a row sees has gaps. */

#include "attention_tiles.h"

#include <string.h>

#include "half.h"
#include "tiles.h"

#if HAS_TILES
#define REACH 64 /* deeper trees' rows may differ in the last bits from those of a text */
#define DIMS 64  /* that are mixed at once */
#define AHEAD 8192 /* bytes */

int takes_tiles(const Decoder *m, const Layer *layer) {
    return may_use_tiles && m->is_half && layer->head_dim % DEEP == 0;
}

static void shape(void) {
    Shapes s = {.palette = 1};
    for (int t = 0; t < 8; t++) s.row_bytes[t] = 64, s.rows[t] = 16;
    SHAPE(s);
}

/* The queries as a product's second factor: [size / DEEP, DEEP / 2, BLOCK] words. */
static void turn_queries(const Block *b, float *turned) {
    memset(turned, 0, sizeof(float) * (size_t)b->words * BLOCK);
    for (int l = 0; l < b->pairs; l++)
        for (int d = 0; d < b->words; d++) turned[d * BLOCK + l] = b->q[l * b->words + d];
}

/* 16 keys from `at` on: their place, or a copy where fewer are left. */
static const char *keys_at(const Block *b, const char *keys, int at, char *copy) {
    const ptrdiff_t row = 2 * b->size;
    if (at + 16 <= b->keys) return keys + at * row;
    memset(copy, 0, 16 * (size_t)row);
    memcpy(copy, keys + at * row, (size_t)((b->keys - at) * row));
    return copy;
}

void score_by_tiles(const Block *b, const void *keys) {
    const ptrdiff_t row = 2 * b->size;
    float *queries = b->turned; /* as large as one tile of keys that is turned */
    __attribute__((aligned(64))) float found[2][16][BLOCK];
    char copy[16 * row];
    turn_queries(b, queries);
    shape();
    for (int at = 0; at < b->keys; at += 32) {
        const int both = at + 16 < b->keys;
        const char *first = keys_at(b, keys, at, copy);
        const char *second = both ? keys_at(b, keys, at + 16, copy) : first;
        CLEAR(0);
        CLEAR(1);
        for (ptrdiff_t i = 0; i < 32 * row; i += 64) __builtin_prefetch(first + AHEAD + i);
        for (int d = 0; d < b->size; d += DEEP) {
            LOAD(4, queries + d / 2 * BLOCK, (ptrdiff_t)64);
            LOAD(5, first + 2 * d, row);
            DOT(0, 5, 4);
            LOAD(6, second + 2 * d, row);
            DOT(1, 6, 4);
        }
        STORE(0, found[0], (ptrdiff_t)64);
        STORE(1, found[1], (ptrdiff_t)64);
        for (int half = 0; half <= both; half++)
            for (int l = 0; l < b->pairs; l += LANES) {
                __attribute__((aligned(64))) float turned[LANES][16];
                const float *rows[16];
                for (int i = 0; i < 16; i++) rows[i] = found[half][i];
                for (int i = 0; i < 16; i += LANES) turn(rows + i, l, turned[0] + i, 16);
                for (int p = l; p < least(l + LANES, b->pairs); p++)
                    memcpy(b->s + (ptrdiff_t)p * b->width + at + 16 * half, turned[p - l], 64);
            }
    }
    RELEASE;
}

/* Up to which key a row's groups go. A row of a text has as many tokens before it as it has keys;
   one of a tree may have fewer. */
static int groups_end(const Pass *pass, int row) {
    const int64_t place = pass->start + row, position = pass->positions[row];
    int64_t end = (position < place ? position : place) - REACH;
    if (position != place && end > pass->start) end = pass->start;
    return end < 0 ? 0 : (int)(end / GROUP * GROUP);
}

/* The shares of pair l up to key `end` to bf16 and their sum, then 0 up to key `last`. They stand
   no longer in the scores from key `begin` on. */
static void move_shares(const Block *b, int l, int end, int begin, int last) {
    float *s = b->s + (ptrdiff_t)l * b->width;
    vec sum = all(0.0f);
    for (int j = 0; j < last; j += LANES) {
        uint16_t *to = b->shares + ((ptrdiff_t)(j / GROUP) * BLOCK + l) * GROUP + j % GROUP;
        const vec share = j < end ? load(s + j) : all(0.0f);
        *(halves *)to = narrow(share);
        sum += share;
        if (j >= begin && j < end) store(s + j, all(0.0f));
    }
    b->whole[l] = total(sum);
}

typedef uint16_t line __attribute__((vector_size(64), aligned(2), may_alias));

/* Two keys' values of 32 dimensions, those of one dimension side by side: 16 dimensions go to
   `low`, 16 to `high`. */
INLINE void interleave(const uint16_t *even, const uint16_t *odd, uint16_t *low, uint16_t *high) {
    const line a = *(const line *)even, b = *(const line *)odd;
    *(line *)low = SHUFFLE(a, b, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9,
                           41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47);
    *(line *)high =
        SHUFFLE(a, b, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25,
                57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63);
}

/* Values of a group of keys, of DIMS dimensions or the last DEEP ones, as a product's second
   factor. */
static void pair_values(const Block *b, const uint16_t *values, int dims,
                        uint16_t (*to)[GROUP / 2][DEEP]) {
    for (int i = 0; i < GROUP * b->size; i += 32) __builtin_prefetch(values + AHEAD / 2 + i);
    for (int j = 0; j < GROUP; j += 2, values += 2 * b->size)
        for (int d = 0; d < dims; d += DEEP)
            interleave(values + d, values + b->size + d, to[d / 16][j / 2], to[d / 16 + 1][j / 2]);
}

static void mix_dims(const Block *b, const uint16_t *values, int dim, int dims, int last) {
    __attribute__((aligned(64))) uint16_t paired_values[DIMS / 16][GROUP / 2][DEEP];
    __attribute__((aligned(64))) float found[DIMS / 16][BLOCK][16];
    CLEAR_SUMS;
    for (int j = 0; j < last; j += GROUP) {
        pair_values(b, values + (ptrdiff_t)j * b->size + dim, dims, paired_values);
        LOAD(4, b->shares + (ptrdiff_t)j * BLOCK, (ptrdiff_t)64);
        LOAD(5, paired_values[0], (ptrdiff_t)64);
        DOT(0, 4, 5);
        LOAD(6, paired_values[1], (ptrdiff_t)64);
        DOT(1, 4, 6);
        if (dims < DIMS) continue;
        LOAD(5, paired_values[2], (ptrdiff_t)64);
        DOT(2, 4, 5);
        LOAD(6, paired_values[3], (ptrdiff_t)64);
        DOT(3, 4, 6);
    }
    STORE_SUMS(found);
    for (int l = 0; l < b->pairs; l++)
        for (int d = 0; d < dims; d += 16) memcpy(b->to[l] + dim + d, found[d / 16][l], 64);
}

int mix_by_tiles(const Block *b, const Pass *pass, const void *values) {
    int ends[BLOCK], least_end = b->keys, last = 0;
    for (int l = 0; l < b->pairs; l++) {
        const int end = groups_end(pass, b->row[l]);
        ends[l] = end > b->from ? end - b->from : 0;
        least_end = least(least_end, ends[l]);
        last = ends[l] > last ? ends[l] : last;
    }
    if (!last) return 0;
    memset(b->shares, 0, (size_t)last * BLOCK * sizeof *b->shares);
    for (int l = 0; l < b->pairs; l++) move_shares(b, l, ends[l], least_end, last);
    shape();
    for (int dim = 0; dim < b->size; dim += DIMS)
        mix_dims(b, values, dim, least(DIMS, b->size - dim), last);
    RELEASE;
    return least_end;
}

#else
int takes_tiles(const Decoder *m, const Layer *layer) {
    (void)m, (void)layer;
    return 0;
}
void score_by_tiles(const Block *b, const void *keys) { (void)b, (void)keys; }
int mix_by_tiles(const Block *b, const Pass *pass, const void *values) {
    (void)b, (void)pass, (void)values;
    return 0;
}
#endif
