/* A product is summed block by block: y = sum of scale * (numbers x) + floor * (sum of x). Numbers
   are exact in bf16, so no weight is rounded, and each is unpacked by a look-up alone. */

#include "packed.h"

#include <string.h>

#include "half.h"
#include "team.h"
#include "tiles.h"

#define CHUNK 64  /* inputs of a panel that are unpacked at once: the largest block */
#define FEWEST 16 /* inputs of a block */
#define BLOCKS (CHUNK / FEWEST)
#define ROWS 16 /* that are multiplied at once */

#if defined(__AVX512F__)
typedef float lanes __attribute__((vector_size(64), aligned(4), may_alias));
INLINE lanes added(lanes a, lanes b, lanes sum) {
    __asm__("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}
#else
typedef loose lanes;
INLINE lanes added(lanes a, lanes b, lanes sum) { return fused(a, b, sum); }
#endif
#define WIDTH ((int)(sizeof(lanes) / sizeof(float)))

/* Some inputs of a panel. */
typedef struct {
    const Product *p;
    int from, count, blocks; /* count: inputs */
    __attribute__((aligned(64))) float scales[BLOCKS][PANEL], floors[BLOCKS][PANEL];
    __attribute__((aligned(64))) uint16_t numbers[CHUNK * PANEL];
    __attribute__((aligned(64))) float sums[BLOCKS][ROWS][PANEL];
} Chunk;

static size_t whole_lines(size_t bytes) { return (bytes + 63) / 64 * 64; }

static float *totals_at(const Product *p) {
    return (float *)((char *)p->x + whole_lines((size_t)p->rows * (size_t)p->ins * 2));
}

static float *outputs_at(const Product *p) {
    const size_t blocks = (size_t)(p->ins / p->weights.block);
    return (float *)((char *)totals_at(p) + whole_lines((size_t)p->rows * blocks * 4));
}

size_t packed_room(const Product *p) {
    const size_t blocks = (size_t)(p->ins / p->weights.block), rows = (size_t)p->rows;
    return 64 + whole_lines(rows * blocks * 4) + rows * PANEL * 4;
}

void add_up_blocks(const Product *p) {
    if (!p->weights.has_floor) return;
    const uint16_t *x = p->x;
    const int block = p->weights.block, count = p->rows * (p->ins / block);
    float *totals = totals_at(p);
    for (int b = 0; b < count; b++, x += block) {
        vec sum = all(0.0f);
        for (int k = 0; k < block; k += LANES) sum += widen(*(const halves *)(x + k));
        totals[b] = total(sum);
    }
}

static void unpack_chunk(Chunk *c, const char *panel) {
    const Weights *w = &c->p->weights;
    const ptrdiff_t size = panel_size(w, w->block), table = PANEL * (w->is_wide ? 4 : 2);
    panel += c->from / w->block * size;
    for (int b = 0; b < c->blocks; b++, panel += size) {
        unpack_scales(w, panel, c->scales[b]);
        if (w->has_floor) unpack_scales(w, panel + table, c->floors[b]);
        unpack_numbers(w, panel + table * (1 + w->has_floor), c->numbers + b * w->block * PANEL);
    }
}

#if HAS_TILES
/* Tiles 0 and 1 are sums of a panel's two halves, 4 rows of x, 6 and 7 numbers. */
static void shape(int block, int rows) {
    Shapes s = {.palette = 1};
    const int deep = least(block, DEEP);
    for (int t = 0; t < 8; t++) s.row_bytes[t] = 64, s.rows[t] = (uint8_t)rows;
    s.row_bytes[4] = (uint16_t)(2 * deep), s.rows[6] = s.rows[7] = (uint8_t)(deep / 2);
    SHAPE(s);
}

/* One block's products go to the sums LEFT and RIGHT. */
#define BLOCK_BY_TILES(LEFT, RIGHT)                                          \
    CLEAR(LEFT);                                                             \
    CLEAR(RIGHT);                                                            \
    for (int k = 0; k < block; k += deep, x += 2 * deep, w += deep / 2 * line) { \
        LOAD(4, x, stride);                                                  \
        LOAD(6, w, line);                                                    \
        DOT(LEFT, 4, 6);                                                     \
        LOAD(7, w + 64, line);                                               \
        DOT(RIGHT, 4, 7);                                                    \
    }
#define STORE_BLOCK(LEFT, RIGHT, b)         \
    STORE(LEFT, c->sums[b][0], line);       \
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
#else
static void shape(int block, int rows) { (void)block, (void)rows; }
static void sum_by_tiles(Chunk *c, int row) { (void)c, (void)row; }
#define RELEASE (void)0
#endif

static void sum_by_vectors(Chunk *c, int row, int rows) {
    const int block = c->p->weights.block;
    Product q = {.rows = rows, .ins = block, .outs = PANEL, .stride = c->p->stride};
    q.weights.kind = HALVES;
    for (int b = 0; b < c->blocks; b++) {
        q.x = (const float *)c->p->x + (ptrdiff_t)row * q.stride + (c->from + b * block) / 2;
        q.y = c->sums[b][0];
        sweep(&q, c->numbers + b * block * PANEL, 0, 1);
    }
}

/* What the chunk's blocks add to COUNT rows of outputs of its panel; they share what they read. */
#define ADD(COUNT)                                                                             \
    static void add_##COUNT(const Chunk *c, int i, float *y, const float *totals, int apart) { \
        for (int j = 0; j < PANEL; j += WIDTH) {                                               \
            lanes sums[COUNT];                                                                 \
            _Pragma("GCC unroll 8") for (int r = 0; r < COUNT; r++)                            \
                sums[r] = *(const lanes *)(y + r * PANEL + j);                                 \
            for (int b = 0; b < c->blocks; b++) {                                              \
                const lanes scale = *(const lanes *)(c->scales[b] + j);                        \
                _Pragma("GCC unroll 8") for (int r = 0; r < COUNT; r++)                        \
                    sums[r] = added(*(const lanes *)(c->sums[b][i + r] + j), scale, sums[r]);  \
                if (!totals) continue;                                                         \
                const lanes floor = *(const lanes *)(c->floors[b] + j);                        \
                _Pragma("GCC unroll 8") for (int r = 0; r < COUNT; r++)                        \
                    sums[r] = added(totals[r * apart + b] - (lanes){0}, floor, sums[r]);       \
            }                                                                                  \
            _Pragma("GCC unroll 8") for (int r = 0; r < COUNT; r++)                            \
                *(lanes *)(y + r * PANEL + j) = sums[r];                                       \
        }                                                                                      \
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

void multiply_packed(const Product *p, int at, int end) {
    const ptrdiff_t size = panel_size(&p->weights, p->ins);
    const char *panel = (const char *)p->weights.panels + at * size;
    const int tiled = is_tiled(p), block = p->weights.block;
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
                if (tiled && shaped != rows) shape(block, shaped = rows);
                if (tiled) sum_by_tiles(&c, row);
                else sum_by_vectors(&c, row, rows);
                add_chunk(&c, row, rows);
            }
        }
        for (int i = 0; i < p->rows; i++)
            for (int j = 0; j < PANEL; j += LANES)
                put(p, i, at * PANEL + j, load(outputs + (ptrdiff_t)i * PANEL + j));
    }
    if (tiled) RELEASE;
}
