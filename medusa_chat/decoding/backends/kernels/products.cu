// Products of a few rows with weights of 4 or 8 bits, as bitsandbytes keeps them: out = x W^T.
//
// A block of threads takes 16 outputs a tile, and then those of the next group; its eight warps
// share the inputs. A product on the tensor cores sums over its inputs in any order, so what a
// thread has of 64 inputs are 16 side by side, of the weights and of x: nothing is laid out anew.
// Of each output a warp copies 128 bytes at a time to shared memory, and the next ones while it
// computes: requests of whole lines are what the device answers fast. Two weights of 4 bits, which
// share a byte, are looked up at once in a table of 256 pairs with a copy for each bank of shared
// memory, so that no thread waits for another. Scales are multiplied with sums, never with a
// weight. Sums are taken in one order, whatever the number of rows.

#include "device.cuh"

// BITS: 4 or 8. EIGHTS: of 8 rows of x. TILES: of 16 outputs. RESIDENT: blocks a multiprocessor.
#define OUTPUTS (16 * TILES)
#define BLOCK 64                // inputs that share a scale, in 4 bits
#define BYTES (BLOCK * BITS / 8)
#define CHUNK 128               // bytes of an output
#define BLOCKS (CHUNK / BYTES)
#define SCALES (BITS == 4 ? 16 : 0) // bytes, of a chunk
#define STAGE (OUTPUTS * (CHUNK + SCALES))

#if BITS == 4
typedef uint2 Codes; // of 16 weights
#else
typedef uint4 Codes;
#endif

typedef struct {
    const u8 *codes;     // [outputs, inputs * BITS / 8], at least OUTPUTS of them
    const float *scales; // [outputs, inputs / 64] in 4 bits, else [outputs]
    const u16 *x;        // [rows, inputs], at most 8 EIGHTS rows
    int rows, blocks;
} Product;

// Where 16 bytes of an output's chunk lie: no two threads that read at a time meet in a bank.
DEVICE int place_of(int output, int piece) {
    return output * CHUNK + 16 * (piece ^ (BITS == 4 ? (output & 3) << 1 : (output & 1) << 2));
}

// Copies a warp's chunks of the outputs from `first` on, from block `at` on, and their scales.
DEVICE void fetch(u8 *stage, const Product *given, int first, int at, int lane) {
    const u32 size = given->blocks * BYTES, start = at * BYTES + lane % 8 * 16;
#pragma unroll
    for (int i = 0; i < OUTPUTS; i += 4) {
        const int n = lane / 8 + i;
        const u8 *from = given->codes + ((size_t)(first + n) * size + start);
        copy16(stage + place_of(n, lane % 8), from, start < size ? 16 : 0);
    }
#pragma unroll
    for (int i = 0; i < OUTPUTS && BITS == 4; i += 8) {
        const int n = lane / 4 + i, block = min(at + lane % 4, given->blocks - 1);
        const float *from = given->scales + ((first + n) * given->blocks + block);
        copy4(stage + OUTPUTS * CHUNK + SCALES * i + 4 * lane, from);
    }
}

// The 16 inputs of thread t in a block, of one row; zeros where there is none.
DEVICE void inputs_of(u32 found[8], const Product *given, int row, int block, int t) {
    uint4 halves[2] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
    if (row < given->rows && block < given->blocks) {
        const uint4 *at = (const uint4 *)(given->x + (row * given->blocks + block) * BLOCK) + 2 * t;
        halves[0] = at[0], halves[1] = at[1];
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        found[4 * i] = halves[i].x, found[4 * i + 1] = halves[i].y;
        found[4 * i + 2] = halves[i].z, found[4 * i + 3] = halves[i].w;
    }
}

#if BITS == 4
DEVICE void decode(u32 weights[8], Codes codes, const u32 *pairs, u32 bank) {
    const u32 words[2] = {codes.x, codes.y};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        weights[4 * i] = pair(pairs, words[i] << 7, bank);
        weights[4 * i + 1] = pair(pairs, words[i] >> 1, bank);
        weights[4 * i + 2] = pair(pairs, words[i] >> 9, bank);
        weights[4 * i + 3] = pair(pairs, words[i] >> 17, bank);
    }
}
#else
DEVICE void decode(u32 weights[8], Codes codes, const u32 *pairs, u32 bank) {
    const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int i = 0; i < 8; i++) weights[i] = numbers(words[i / 2], 2 * (i % 2));
}
#endif

// whole += W x^T of one block: of tile i and eight j, outputs g and g + 8, rows 2 t and 2 t + 1.
// b: its number in the stage, and `block` its number of all.
DEVICE void add_block(float whole[TILES][EIGHTS][4], const Product *given, const u8 *stage,
                      const u32 *pairs, int b, int block, int lane) {
    const int g = lane / 4, t = lane % 4, byte = b * BYTES + 2 * BITS * t;
    u32 weights[2 * TILES][8], x[8];
    float by[2 * TILES];
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++) {
        const int n = 8 * i + g;
        const u8 *codes = stage + place_of(n, byte / 16) + byte % 16;
        decode(weights[i], *(const Codes *)codes, pairs, 4 * lane);
        if (BITS == 4) by[i] = *(const float *)(stage + OUTPUTS * CHUNK + SCALES * n + 4 * b);
    }
#pragma unroll
    for (int j = 0; j < EIGHTS; j++) {
        inputs_of(x, given, 8 * j + g, block, t);
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            const u32 *low = weights[2 * i], *high = weights[2 * i + 1];
            float own[4] = {}, *sum = BITS == 4 ? own : whole[i][j];
#pragma unroll
            for (int k = 0; k < 8; k += 2)
                multiply(sum, low[k], high[k], low[k + 1], high[k + 1], x[k], x[k + 1]);
#pragma unroll
            for (int k = 0; k < 4 && BITS == 4; k++) whole[i][j][k] += sum[k] * by[2 * i + k / 2];
        }
    }
}

KERNEL product(
    const u8 *codes, const float *scales, const u16 *x, // see Product
    const u16 *table, // [16], the numbers of codes of 4 bits
    u16 *out,         // [rows, outputs]
    int rows, int outputs, int blocks) {
#if BITS == 4
    SHARED(u32, pairs, 256 * 32);
#else
    const u32 *pairs = 0;
#endif
    SHARED(float, others, (WARPS - 1) * OUTPUTS * 8);
    RING(ring, WARPS * 2 * STAGE);
    const Product given = {codes, scales, x, rows, blocks};
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int g = lane / 4, t = lane % 4;
    const int groups = (outputs + OUTPUTS - 1) / OUTPUTS, step = WARPS * BLOCKS;
    u8 *stages = ring + warp * 2 * STAGE;
    int stage = 0, group = blockIdx.x, first = min(group * OUTPUTS, outputs - OUTPUTS);
    if (warp * BLOCKS < blocks) fetch(stages, &given, first, warp * BLOCKS, lane);
#if BITS == 4
    fill(pairs, table, thread);
#endif
    SYNC();
    for (; group < groups; group += gridDim.x) {
        const int next = min((group + (int)gridDim.x) * OUTPUTS, outputs - OUTPUTS);
        float whole[TILES][EIGHTS][4] = {};
        for (int at = warp * BLOCKS; at < blocks; at += step) {
            copied();
            const int goes_on = at + step < blocks;
            if (goes_on || group + gridDim.x < groups)
                fetch(stages + (1 - stage) * STAGE, &given, goes_on ? first : next,
                      goes_on ? at + step : warp * BLOCKS, lane);
#pragma unroll
            for (int b = 0; b < BLOCKS; b++)
                add_block(whole, &given, stages + stage * STAGE, pairs, b, at + b, lane);
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
                float sum = whole[i / 4][j][i % 4];
#pragma unroll
                for (int k = 0; k < WARPS - 1; k++) sum += others[(k * OUTPUTS + n) * 8 + m];
                if (BITS == 8) sum *= scales[first + n] * (1.0f / 127.0f);
                if (row < rows) out[row * outputs + first + n] = rounded(sum);
            }
        }
        first = next; // of fewer outputs than a group's some come twice
    }
}
