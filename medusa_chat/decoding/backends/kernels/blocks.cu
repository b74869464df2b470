// Products of a few rows with the blocks of a GGUF file: out = x W^T, in the file's own numbers.
//
// The weights lie in tiles (decoding/backends/block_tiles.py): of 16 outputs and some inputs, codes
// in the order in which the threads of a warp multiply them, then their scales. Its eight warps
// share the inputs of a block's outputs; each copies a run of whole tiles to shared memory and the
// next one while it computes. Codes are multiplied as the whole numbers that they are, which 16 bits
// hold exactly, and their sums, group by group, by scales in fp32. What is added to all weights of
// a group is multiplied by the sum of its inputs, a product with ones. Sums are taken in one order,
// whatever the number of rows.

#include "device.cuh"

// BITS: of a code. GROUP: inputs with one scale. CENTRE: the code of 0. FORM: how scales lie.
// HAS_TABLE: whether a table has the numbers of the codes. UNIT: blocks of 64 inputs in a tile.
// TILE: its bytes. EIGHTS: of 8 rows of x. TILES: of 16 outputs. RESIDENT: blocks a multiprocessor.
// IS_WIDE: whether sums are left in fp32.
#define OUTPUTS (16 * TILES)
#define BLOCK 64
#define SPAN (BITS == 8 ? 2 : 4)            // blocks that a warp copies at a time
#define UNITS (SPAN / UNIT)                 // tiles of them
#define STAGE (UNITS * TILE)                // bytes, of 16 outputs
#define LOW (BITS == 8 ? 16 : 8)            // bytes of 16 codes, and of their upper bits
#define UPPER (BITS == 5 ? 2 : BITS == 6 ? 4 : 0)
#define CODES (64 * UNIT * (LOW + UPPER))   // bytes of a tile before its scales
#define EACH (BLOCK / GROUP)                // groups in a block
#define GROUPS (SPAN * EACH)
#define HALVES 0
#define FLOORED 1
#define SIXES 2
#define BYTES 3
#define NONLINEAR 4
#define POWERS 5
#define HAS_FLOOR (FORM == FLOORED || FORM == SIXES)
#define SCALES (GROUPS * OUTPUTS * (1 + HAS_FLOOR)) // numbers of a warp
#define ONES (IS_BF16 ? 0x3F803F80u : 0x3C003C00u)

#if IS_WIDE
typedef float Out;
#define STORED(value) (value)
#else
typedef u16 Out;
#define STORED(value) rounded(value)
#endif

typedef struct {
    const u8 *tiles; // [strips of 16 outputs, units, TILE]
    const u16 *x;    // [rows, inputs], at most 8 EIGHTS rows
    int rows, inputs, strips, units;
} Product;

// Copies a warp's tiles of the strips from `first` on, from tile `at` on.
DEVICE void fetch(u8 *stage, const Product *given, int first, int at, int lane) {
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        const int strip = min(first + i, given->strips - 1);
        const u8 *from = given->tiles + ((size_t)strip * given->units + at) * TILE;
        const int left = (given->units - at) * TILE;
#pragma unroll
        for (int p = 16 * lane; p < STAGE; p += 512)
            copy16(stage + i * STAGE + p, from + p, p < left ? 16 : 0);
    }
}

DEVICE float half_at(const u8 *at, int i) { return of_half(((const u16 *)at)[i]); }

// The scales of one output in half of the groups of a stage, as numbers: `by` has OUTPUTS of each
// group, and the floors after all scales.
DEVICE void spread(float *by, const u8 *stage, int output, int part) {
#if FORM == HALVES || FORM == FLOORED || FORM == POWERS
#pragma unroll
    for (int i = 0; i < GROUPS / 2; i++) {
        const int group = part * (GROUPS / 2) + i, place = group % EACH * 16 + output;
        const u8 *scales = stage + group / EACH * TILE + CODES;
#if FORM == POWERS
        const u32 power = scales[place];
        by[group * OUTPUTS] = of_bits(power < 2 ? 0x00200000u << power : (power - 1) << 23);
#else
        by[group * OUTPUTS] = half_at(scales, place);
        if (HAS_FLOOR) by[(GROUPS + group) * OUTPUTS] = half_at(scales + 32 * EACH, place);
#endif
    }
#else
    const u8 *scales = stage + CODES;
    const float scale = half_at(scales, output);
#if FORM == SIXES
    const float floor = half_at(scales + 32, output);
    const u32 *words = (const u32 *)(scales + 64) + 3 * output;
    const u32 first = words[0], second = words[1], third = words[2];
    const u32 six = part ? (third & 0x0F0F0F0F) | (first >> 2 & 0x30303030) : first & 0x3F3F3F3F;
    const u32 sunk =
        part ? (third >> 4 & 0x0F0F0F0F) | (second >> 2 & 0x30303030) : second & 0x3F3F3F3F;
#elif FORM == BYTES
    const u32 *words = (const u32 *)(scales + 32) + 4 * output + 2 * part;
#else
    const u32 low = ((const u32 *)(scales + 64))[output] >> 16 * part;
    const u32 high = ((const u16 *)(scales + 32))[output] >> 8 * part;
#endif
#pragma unroll
    for (int i = 0; i < GROUPS / 2; i++) {
        float *at = by + (part * (GROUPS / 2) + i) * OUTPUTS;
#if FORM == SIXES
        at[0] = scale * (float)(six >> 8 * i & 255);
        at[GROUPS * OUTPUTS] = -(floor * (float)(sunk >> 8 * i & 255));
#elif FORM == BYTES
        at[0] = scale * (float)(signed char)(words[i / 4] >> 8 * (i % 4));
#else
        at[0] = scale * (float)((int)((low >> 4 * i & 15) | (high >> 2 * i & 3) << 4) - 32);
#endif
    }
#endif
}

// 16 weights of thread t, in pairs. block, output: in the tile.
DEVICE void decode(u32 weights[8], const u8 *tile, int block, int output, int t, const u32 *pairs,
                   u32 bank) {
    const int place = (block * 16 + output) * 4 + t;
#if BITS == 8
    const uint4 codes = *(const uint4 *)(tile + 16 * place);
    const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int i = 0; i < 8; i++) weights[i] = numbers(words[i / 2], 2 * (i % 2));
#else
    const uint2 codes = *(const uint2 *)(tile + 8 * place);
    const u32 words[2] = {codes.x, codes.y};
#if HAS_TABLE
#pragma unroll
    for (int i = 0; i < 2; i++) {
        weights[4 * i] = pair(pairs, words[i] << 7, bank);
        weights[4 * i + 1] = pair(pairs, words[i] >> 1, bank);
        weights[4 * i + 2] = pair(pairs, words[i] >> 9, bank);
        weights[4 * i + 3] = pair(pairs, words[i] >> 17, bank);
    }
#else
    const u8 *upper = tile + 512 * UNIT + UPPER * place;
#if BITS == 5
    const u32 bits = *(const u16 *)upper, fifth = ((bits & 0xFF) | (bits & 0xFF00) << 8) << 4;
#elif BITS == 6
    const u32 bits = *(const u32 *)upper;
#endif
#pragma unroll
    for (int i = 0; i < 8; i++) {
        u32 both = words[i / 4] >> 4 * (i % 4) & 0x000F000F;
#if BITS == 5
        both |= fifth >> i & 0x00100010;
#elif BITS == 6
        both |= (i < 2 ? bits << (4 - 2 * i) : bits >> (2 * i - 4)) & 0x00300030;
#endif
        weights[i] = lowered(both, CENTRE);
    }
#endif
#endif
}

// The 16 inputs of thread t in a block, of one row; zeros where there is none.
DEVICE void inputs_of(u32 found[8], const Product *given, int row, int block, int t) {
    const u16 *from = given->x + ((size_t)row * given->inputs + block * BLOCK);
#pragma unroll
    for (int c = 0; c < EACH; c++) {
        const int is_there = row < given->rows && block * BLOCK + c * GROUP < given->inputs;
#if GROUP == 32
        uint4 four = {0, 0, 0, 0};
        if (is_there) four = *(const uint4 *)(from + 32 * c + 8 * t);
        found[4 * c] = four.x, found[4 * c + 1] = four.y;
        found[4 * c + 2] = four.z, found[4 * c + 3] = four.w;
#else
        uint2 two = {0, 0};
        if (is_there) two = *(const uint2 *)(from + 16 * c + 4 * t);
        found[2 * c] = two.x, found[2 * c + 1] = two.y;
#endif
    }
}

// whole += W x^T of one block: of tile i and eight j, outputs g and g + 8, rows 2 t and 2 t + 1.
// b: its number in the stage, and `block` its number of all. scales: what `spread` makes.
DEVICE void add_block(float whole[TILES][EIGHTS][4], const Product *given, const u8 *stage,
                      const float *scales, const u32 *pairs, int b, int block, int lane) {
    const int g = lane / 4, t = lane % 4;
    u32 weights[2 * TILES][8], x[8];
    float by[EACH][2 * TILES], floors[EACH][2 * TILES];
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++) {
        const u8 *tile = stage + i / 2 * STAGE + b / UNIT * TILE;
        decode(weights[i], tile, b % UNIT, 8 * (i % 2) + g, t, pairs, 4 * lane);
#pragma unroll
        for (int c = 0; c < EACH; c++) {
            const int at = (b * EACH + c) * OUTPUTS + 8 * i + g;
            by[c][i] = scales[at];
            if (HAS_FLOOR) floors[c][i] = scales[GROUPS * OUTPUTS + at];
        }
    }
#pragma unroll
    for (int j = 0; j < EIGHTS; j++) {
        inputs_of(x, given, 8 * j + g, block, t);
#pragma unroll
        for (int c = 0; c < EACH; c++) {
            const int first = c * GROUP / 8, last = first + GROUP / 8;
            float inputs[4] = {};
#pragma unroll
            for (int k = first; k < last && HAS_FLOOR; k += 2)
                multiply(inputs, ONES, ONES, ONES, ONES, x[k], x[k + 1]);
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                const u32 *low = weights[2 * i], *high = weights[2 * i + 1];
                float sum[4] = {};
#pragma unroll
                for (int k = first; k < last; k += 2)
                    multiply(sum, low[k], high[k], low[k + 1], high[k + 1], x[k], x[k + 1]);
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    whole[i][j][k] += sum[k] * by[c][2 * i + k / 2];
                    if (HAS_FLOOR) whole[i][j][k] += inputs[k] * floors[c][2 * i + k / 2];
                }
            }
        }
    }
}

KERNEL product(
    const u8 *tiles, const u16 *x, // see Product
    const u16 *table,              // [16], the numbers of the codes, where they have one
    Out *out,                      // [rows, ...], rows of `stride` numbers
    int rows, int inputs, int outputs, int units, int stride) {
#if HAS_TABLE
    SHARED(u32, pairs, 256 * 32);
#else
    const u32 *pairs = 0;
#endif
    SHARED(float, others, (WARPS - 1) * OUTPUTS * 8);
    RING(ring, WARPS * (2 * TILES * STAGE + 4 * SCALES));
    const int strips = (outputs + 15) / 16, blocks = units * UNIT;
    const Product given = {tiles, x, rows, inputs, strips, units};
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int g = lane / 4, t = lane % 4, step = WARPS * SPAN;
    u8 *stages = ring + warp * 2 * TILES * STAGE;
    float *scales = (float *)(ring + WARPS * 2 * TILES * STAGE) + warp * SCALES;
    int stage = 0, first = blockIdx.x * TILES;
    if (warp * SPAN < blocks) fetch(stages, &given, first, warp * UNITS, lane);
#if HAS_TABLE
    fill(pairs, table, thread);
#endif
    SYNC();
    for (; first < strips; first += gridDim.x * TILES) {
        const int next = first + gridDim.x * TILES;
        float whole[TILES][EIGHTS][4] = {};
        for (int at = warp * SPAN; at < blocks; at += step) {
            copied();
            const int goes_on = at + step < blocks;
            if (goes_on || next < strips)
                fetch(stages + (1 - stage) * TILES * STAGE, &given, goes_on ? first : next,
                      (goes_on ? at + step : warp * SPAN) / UNIT, lane);
            const u8 *here = stages + stage * TILES * STAGE;
#pragma unroll
            for (int i = 0; i < TILES; i++)
                spread(scales + 16 * i + lane % 16, here + i * STAGE, lane % 16, lane / 16);
            warp_waits();
#pragma unroll(EIGHTS > 2 ? 1 : SPAN) // more would not fit into registers
            for (int b = 0; b < SPAN; b++)
                add_block(whole, &given, here, scales, pairs, b, at + b, lane);
            stage = 1 - stage;
        }
#pragma unroll
        for (int j = 0; j < EIGHTS; j++) {
            SYNC();
#pragma unroll
            for (int i = 0; i < 4 * TILES; i++) {
                const int n = 8 * (i / 2) + g, m = 2 * t + i % 2;
                if (warp > 0) others[((warp - 1) * OUTPUTS + n) * 8 + m] = whole[i / 4][j][i % 4];
            }
            SYNC();
            if (warp > 0) continue;
#pragma unroll
            for (int i = 0; i < 4 * TILES; i++) {
                const int n = 8 * (i / 2) + g, m = 2 * t + i % 2, row = 8 * j + m;
                const int output = 16 * first + n;
                float sum = whole[i / 4][j][i % 4];
#pragma unroll
                for (int k = 0; k < WARPS - 1; k++) sum += others[(k * OUTPUTS + n) * 8 + m];
                if (row < rows && output < outputs)
                    out[(size_t)row * stride + output] = STORED(sum);
            }
        }
    }
}
