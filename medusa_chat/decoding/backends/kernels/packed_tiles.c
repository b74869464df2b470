/* Products of a GGUF file's numbers by tiles: some inputs of a panel are unpacked to bf16, then all
   rows have them. */

#include "packed.h"

#include <string.h>

#include "half.h"
#include "team.h"
#include "tiles.h"

#if HAS_TILES
#define CHUNK 64  /* inputs of a panel that are unpacked at once: the largest block */
#define FEWEST 16 /* inputs of a block */
#define BLOCKS (CHUNK / FEWEST)
#define ROWS 16 /* that are multiplied at once */
#define HALF PANEL /* numbers of two inputs and half of a panel's outputs: a line of bf16 */

/* Some inputs of a panel. */
typedef struct {
    const Product *p;
    int from, count, blocks; /* count: inputs */
    __attribute__((aligned(64))) float scales[BLOCKS][PANEL], floors[BLOCKS][PANEL];
    __attribute__((aligned(64))) uint16_t numbers[CHUNK * PANEL];
    __attribute__((aligned(64))) float sums[BLOCKS][ROWS][PANEL];
} Chunk;

typedef uint16_t line __attribute__((vector_size(64)));

INLINE line line_at(const void *p) {
    line x;
    memcpy(&x, p, sizeof x);
    return x;
}

/* The numbers 0 to 15 as bf16, twice: of an index the lower five bits count. */
static const line table = {
    0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
    0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
    0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};

/* Four pairs of inputs of a HALF to bf16. */
INLINE void words_to_bf16(const char *words, uint16_t *to) {
    const line x = line_at(words);
    _Pragma("GCC unroll 4") for (int j = 0; j < IN_A_WORD; j++) {
        line found;
        __asm__("vpermw %1, %2, %0" : "=v"(found) : "v"(table), "v"(x >> (4 * j)));
        memcpy(to + j * BOTH, &found, sizeof found);
    }
}

/* A pair of inputs of a HALF: whole numbers of 8 bits are exact in the upper half of a float. */
INLINE void bytes_to_bf16(const char *bytes, uint16_t *to) {
    static const line upper = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                               33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    typedef char sixteen __attribute__((vector_size(16), aligned(1), may_alias));
    wide_ints low, high;
    __asm__("vpmovsxbd %1, %0" : "=v"(low) : "m"(*(const sixteen *)bytes));
    __asm__("vpmovsxbd %1, %0" : "=v"(high) : "m"(*(const sixteen *)(bytes + 16)));
    wide a = __builtin_convertvector(low, wide);
    wide b = __builtin_convertvector(high, wide);
    line found = upper;
    __asm__("vpermi2w %2, %1, %0" : "+v"(found) : "v"(a), "v"(b));
    memcpy(to, &found, sizeof found);
}

/* A block of a panel to bf16. */
static void unpack_block(const Weights *w, const char *from, uint16_t *to) {
    const uint16_t *const end = to + w->block * PANEL;
    if (w->kind == NIBBLES)
        for (; to < end; from += 4 * HALF, to += IN_A_WORD * BOTH) {
            fetch(from, 4 * HALF);
            words_to_bf16(from, to);
            words_to_bf16(from + 2 * HALF, to + HALF);
        }
    else
        for (; to < end; from += BOTH, to += BOTH) {
            fetch(from, BOTH);
            bytes_to_bf16(from, to);
            bytes_to_bf16(from + HALF, to + HALF);
        }
}

static void unpack_chunk(Chunk *c, const char *panel) {
    const Weights *w = &c->p->weights;
    const ptrdiff_t size = panel_size(w, w->block), table = table_bytes(w);
    panel += c->from / w->block * size;
    for (int b = 0; b < c->blocks; b++, panel += size) {
        for (int j = 0; j < PANEL; j += WIDTH) {
            store_wide(c->scales[b] + j, floats_at(w, panel, j));
            if (w->has_floor) store_wide(c->floors[b] + j, floats_at(w, panel + table, j));
        }
        unpack_block(w, panel + table * (1 + w->has_floor), c->numbers + b * w->block * PANEL);
    }
}

/* Tiles 0 and 1 are sums of a panel's two halves, 4 rows of x, 6 and 7 numbers. */
static void shape(int block, int rows) {
    Shapes s = {.palette = 1};
    const int deep = least(block, DEEP);
    for (int t = 0; t < 8; t++) s.row_bytes[t] = 64, s.rows[t] = (uint8_t)rows;
    s.row_bytes[4] = (uint16_t)(2 * deep), s.rows[6] = s.rows[7] = (uint8_t)(deep / 2);
    SHAPE(s);
}

/* One block's products go to the sums LEFT and RIGHT. */
#define BLOCK_BY_TILES(LEFT, RIGHT)                                              \
    CLEAR(LEFT);                                                                 \
    CLEAR(RIGHT);                                                                \
    for (int k = 0; k < block; k += deep, x += 2 * deep, w += deep / 2 * line) { \
        LOAD(4, x, stride);                                                      \
        LOAD(6, w, line);                                                        \
        DOT(LEFT, 4, 6);                                                         \
        LOAD(7, w + 64, line);                                                   \
        DOT(RIGHT, 4, 7);                                                        \
    }
#define STORE_BLOCK(LEFT, RIGHT, b)   \
    STORE(LEFT, c->sums[b][0], line); \
    STORE(RIGHT, c->sums[b][0] + 16, line)

static void sum_by_tiles(Chunk *c, int row) {
    const Product *p = c->p;
    const ptrdiff_t stride = (ptrdiff_t)p->ins * 2, line = PANEL * 4;
    const char *x = (const char *)p->x + row * stride + 2 * c->from, *w = (const char *)c->numbers;
    const int block = p->weights.block, deep = least(block, DEEP);
    for (int b = 0; b < c->blocks; b += 2) { /* two at once: each waits for its products */
        const int both = b + 1 < c->blocks;
        BLOCK_BY_TILES(0, 1)
        if (both) {
            BLOCK_BY_TILES(2, 3)
        }
        STORE_BLOCK(0, 1, b);
        if (both) {
            STORE_BLOCK(2, 3, b + 1);
        }
    }
}

/* What the chunk's blocks add to COUNT rows of outputs of its panel; they share what they read. */
#define ADD(COUNT)                                                                                      \
    static void add_##COUNT(const Chunk *c, int i, float *y, const float *totals, int apart) {          \
        for (int j = 0; j < PANEL; j += WIDTH) {                                                        \
            wide sums[COUNT];                                                                           \
            _Pragma("GCC unroll 8") for (int r = 0; r < COUNT; r++)                                     \
                sums[r] = *(const loose_wide *)(y + r * PANEL + j);                                     \
            for (int b = 0; b < c->blocks; b++) {                                                       \
                const wide scale = *(const loose_wide *)(c->scales[b] + j);                             \
                _Pragma("GCC unroll 8") for (int r = 0; r < COUNT; r++)                                 \
                    sums[r] = fused_wide(*(const loose_wide *)(c->sums[b][i + r] + j), scale, sums[r]); \
                if (!totals) continue;                                                                  \
                const wide floor = *(const loose_wide *)(c->floors[b] + j);                             \
                _Pragma("GCC unroll 8") for (int r = 0; r < COUNT; r++)                                 \
                    sums[r] = fused_wide(all_wide(totals[r * apart + b]), floor, sums[r]);              \
            }                                                                                           \
            _Pragma("GCC unroll 8") for (int r = 0; r < COUNT; r++)                                     \
                *(loose_wide *)(y + r * PANEL + j) = sums[r];                                           \
        }                                                                                               \
    }
ADD(1)
ADD(4)

static void add_chunk(const Chunk *c, int row, int rows) {
    const Product *p = c->p;
    const int apart = p->ins / p->weights.block;
    float *y = outputs_at(p) + (ptrdiff_t)row * PANEL;
    const float *totals = totals_at(p) + (ptrdiff_t)row * apart + c->from / p->weights.block;
    for (int i = 0, count; i < rows; i += count, y += count * PANEL, totals += count * apart) {
        count = i + 4 <= rows ? 4 : 1;
        (count == 4 ? add_4 : add_1)(c, i, y, p->weights.has_floor ? totals : NULL, apart);
    }
}

void multiply_packed_tiles(const Product *p, int at, int end) {
    const ptrdiff_t size = panel_size(&p->weights, p->ins);
    const char *panel = (const char *)p->weights.panels + at * size;
    const int block = p->weights.block;
    float *outputs = outputs_at(p);
    Chunk c = {.p = p};
    int shaped = 0;
    for (; at < end; at++, panel += size) {
        memset(outputs, 0, (size_t)p->rows * PANEL * sizeof *outputs);
        for (c.from = 0; c.from < p->ins; c.from += c.count) {
            c.count = least(CHUNK / block * block, p->ins - c.from), c.blocks = c.count / block;
            unpack_chunk(&c, panel);
            for (int row = 0, rows; row < p->rows; row += rows) {
                rows = least(ROWS, p->rows - row);
                if (shaped != rows) shape(block, shaped = rows);
                sum_by_tiles(&c, row);
                add_chunk(&c, row, rows);
            }
        }
        put_panel(p, at);
    }
    RELEASE;
}
#else
void multiply_packed_tiles(const Product *p, int at, int end) { (void)p, (void)at, (void)end; }
#endif
