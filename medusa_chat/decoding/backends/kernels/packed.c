/* The layout of packed weights: a file's blocks into panels, and panels into numbers. */

#include "packed.h"

#include <string.h>

#include "dot.h"
#include "half.h"
#include "team.h"

#define AHEAD 4096 /* bytes */

/* By type of ggml. */
const Format formats[40] = {
    [2] = {4, 0, 0, 8, 32, 18, NO_TABLE},      /* Q4_0 */
    [3] = {4, 0, 1, 0, 32, 20, NO_TABLE},      /* Q4_1 */
    [6] = {5, 0, 0, 16, 32, 22, NO_TABLE},     /* Q5_0 */
    [7] = {5, 0, 1, 0, 32, 24, NO_TABLE},      /* Q5_1 */
    [8] = {8, 0, 0, 0, 32, 34, NO_TABLE},      /* Q8_0 */
    [10] = {2, 16, 1, 0, 256, 84, NO_TABLE},   /* Q2_K */
    [11] = {3, 16, 0, 4, 256, 110, NO_TABLE},  /* Q3_K */
    [12] = {4, 8, 1, 0, 256, 144, NO_TABLE},   /* Q4_K */
    [13] = {5, 8, 1, 0, 256, 176, NO_TABLE},   /* Q5_K */
    [14] = {6, 16, 0, 32, 256, 210, NO_TABLE}, /* Q6_K */
    [20] = {4, 0, 0, 0, 32, 18, CURVE},        /* IQ4_NL */
    [23] = {4, 8, 0, 0, 256, 136, CURVE},      /* IQ4_XS */
    [39] = {4, 0, 0, 0, 32, 17, MXFP4},
};
#define TYPES ((int64_t)(sizeof formats / sizeof *formats))

const Format *format_of(int64_t kind) {
    const int64_t type = kind - PACKED;
    return type >= 0 && type < TYPES && formats[type].bits ? formats + type : NULL;
}

/* Bytes that a block's scales take in a panel, one output's. */
static int head_bytes(const Format *f) {
    if (f->values == MXFP4) return 1;
    if (f->bits == 2) return 4 + f->parts; /* a byte has a scale and a floor, of 4 bits each */
    return (2 + f->parts) * (1 + f->has_floor);
}

/* Bytes of a block of one output in a panel. */
static int block_bytes(const Format *f) { return head_bytes(f) + f->each * f->bits / 8; }

ptrdiff_t panel_size(const Weights *w, ptrdiff_t ins) {
    if (w->kind == FLOATS) return ins * PANEL * 4;
    if (!is_packed(w)) return (ins + 1) / 2 * PANEL * 4;
    const Format *f = format_of(w->kind);
    return ins / f->each * block_bytes(f) * PANEL;
}

/* Bytes of the panels of a packed weight; 0 for a kind that is none, or no whole blocks. */
EXPORT int64_t packed_size(int64_t kind, int64_t outs, int64_t ins) {
    const Format *f = format_of(kind);
    if (!f || outs < 1 || ins < 1 || ins % f->each) return 0;
    const Weights w = {NULL, kind};
    return (outs + PANEL - 1) / PANEL * panel_size(&w, ins);
}

/* ---------------------------------------------------------------------------------- into panels */

/* A block of a file: its numbers, four inputs a word, and what they are multiplied by. */
typedef struct {
    uint32_t words[DEEP / 4];
    uint8_t whole[4], scales[16], floors[16]; /* two of fp16; the parts */
} Stored;

#define LOW 0x0f0f0f0fu

static uint32_t word(const uint8_t *p) {
    uint32_t found;
    memcpy(&found, p, sizeof found);
    return found;
}

/* Bit i of `bits` as the lowest of byte i, for four of them. */
static uint32_t spread(uint32_t bits) {
    return ((bits & 15) * 0x00204081u) & 0x01010101u;
}

/* 16 bytes: the lower halves are the first 16 inputs. */
static void read_halves(const uint8_t *p, uint32_t *to) {
    for (int i = 0; i < 4; i++) {
        to[i] = word(p + 4 * i) & LOW;
        to[i + 4] = word(p + 4 * i) >> 4 & LOW;
    }
}

static void add_fifth(const uint8_t *p, uint32_t *to) {
    const uint32_t bits = word(p);
    for (int i = 0; i < 8; i++) to[i] |= spread(bits >> 4 * i) << 4;
}

/* 128 bytes: of every 32 the lower halves are 32 inputs, the upper ones the next 32. */
static void read_lines(const uint8_t *p, uint32_t *to) {
    for (int i = 0; i < DEEP / 8; i++) {
        const uint32_t both = word(p + 4 * i);
        uint32_t *at = to + i / 8 * 16 + i % 8;
        at[0] = both & LOW, at[8] = both >> 4 & LOW;
    }
}

/* Scales and floors of 6 bits each in 12 bytes. */
static void read_sixes(const uint8_t *p, Stored *s) {
    for (int i = 0; i < 4; i++) {
        s->scales[i] = p[i] & 63, s->scales[i + 4] = (p[i + 8] & 15) | (p[i] >> 6 << 4);
        s->floors[i] = p[i + 4] & 63, s->floors[i + 4] = (p[i + 8] >> 4) | (p[i + 4] >> 6 << 4);
    }
}

/* 32 bytes for 128 inputs, 64 in all: two bits of four times 32. */
static void read_quarters(const uint8_t *p, uint32_t *to, int shift) {
    for (int i = 0; i < DEEP / 4; i++)
        to[i] |= (word(p + i / 32 * 32 + i % 8 * 4) >> (i % 32 / 8 * 2) & 0x03030303u) << shift;
}

/* 32 bytes: bit i of all is of the i-th 32 inputs. */
static void read_bits(const uint8_t *p, uint32_t *to, int shift) {
    for (int i = 0; i < DEEP / 4; i++)
        to[i] |= (word(p + i % 8 * 4) >> (i / 8) & 0x01010101u) << shift;
}

static void read_q2_k(const uint8_t *p, Stored *s) {
    memcpy(s->scales, p, 16);
    memset(s->words, 0, sizeof s->words);
    read_quarters(p + 16, s->words, 0);
    memcpy(s->whole, p + 80, 4);
    s->whole[3] ^= 0x80; /* what the file takes off is added here */
}

static void read_q3_k(const uint8_t *p, Stored *s) {
    const uint8_t *scales = p + 96;
    for (int i = 0; i < 16; i++) {
        const int low = scales[i % 8] >> (i / 8 * 4) & 15, high = scales[8 + i % 4] >> (i / 4 * 2) & 3;
        s->scales[i] = (uint8_t)((low | high << 4) - 32);
    }
    memset(s->words, 0, sizeof s->words);
    read_quarters(p + 32, s->words, 0);
    read_bits(p, s->words, 2);
    memcpy(s->whole, p + 108, 2);
}

static void read_q6_k(const uint8_t *p, Stored *s) {
    for (int i = 0; i < DEEP / 8; i++) { /* of every 64 bytes the lower halves, then the upper ones */
        const uint32_t both = word(p + 4 * i);
        uint32_t *at = s->words + i / 16 * 32 + i % 16;
        at[0] = both & LOW, at[16] = both >> 4 & LOW;
    }
    read_quarters(p + 128, s->words, 4);
    memcpy(s->scales, p + 192, 16);
    memcpy(s->whole, p + 208, 2);
}

static void read_iq4_xs(const uint8_t *p, Stored *s) {
    const int high = p[2] | p[3] << 8;
    memcpy(s->whole, p, 2);
    for (int i = 0; i < 8; i++) {
        const int low = p[4 + i / 2] >> (i % 2 * 4) & 15;
        s->scales[i] = (uint8_t)((low | (high >> 2 * i & 3) << 4) - 32);
        read_halves(p + 8 + 16 * i, s->words + 8 * i);
    }
}

static void read_k(const uint8_t *p, Stored *s, int has_fifth) {
    memcpy(s->whole, p, 4);
    s->whole[3] ^= 0x80;
    read_sixes(p + 4, s);
    read_lines(p + (has_fifth ? 48 : 16), s->words);
    if (has_fifth) read_bits(p + 16, s->words, 4);
}

static void read_stored(const Format *f, const uint8_t *p, Stored *s) {
    if (f == formats + 10) read_q2_k(p, s);
    else if (f == formats + 11) read_q3_k(p, s);
    else if (f == formats + 14) read_q6_k(p, s);
    else if (f == formats + 23) read_iq4_xs(p, s);
    else if (f->parts) read_k(p, s, f->bits == 5);
    else {
        const int head = head_bytes(f);
        memcpy(s->whole, p, (size_t)head);
        if (f->bits == 8) memcpy(s->words, p + head, STEP);
        else read_halves(p + head + (f->bits == 5 ? 4 : 0), s->words);
        if (f->bits == 5) add_fifth(p + head, s->words);
    }
}

/* The words of `bits` for the eight words of 32 inputs. */
static void put_words(const uint32_t *w, int bits, uint32_t *to) {
    const int high = bits == 5 || bits == 6 ? 4 : 2; /* where the bits above begin */
    uint32_t *above = to;
    if (bits == 8) {
        for (int g = 0; g < 8; g++) to[g * PANEL] = w[g];
        return;
    }
    if (bits >= 4)
        for (int n = 0; n < 4; n++, above += PANEL)
            *above = (w[2 * n] & LOW) | (w[2 * n + 1] & LOW) << 4;
    if (bits == 2 || bits == 3 || bits == 6)
        for (int u = 0; u < 2; u++, above += PANEL) {
            *above = 0;
            for (int i = 0; i < 4; i++)
                *above |= (w[4 * u + i] >> (bits == 6 ? 4 : 0) & 0x03030303u) << 2 * i;
        }
    if (bits % 2 == 0) return;
    *above = 0;
    for (int g = 0; g < 8; g++) *above |= (w[g] >> high & 0x01010101u) << g;
}

/* A block into its lane of a panel. */
static void put_stored(const Format *f, const Stored *s, char *to, int lane) {
    if (f->values == MXFP4) to[lane] = (char)s->whole[0], to += PANEL;
    else
        for (int i = 0; i < 1 + f->has_floor; i++, to += 2 * PANEL)
            memcpy(to + 2 * lane, s->whole + 2 * i, 2);
    for (int i = 0; i < f->parts; i++, to += PANEL) to[lane] = (char)s->scales[i];
    const int floors = f->has_floor && f->bits > 2 ? f->parts : 0;
    for (int i = 0; i < floors; i++, to += PANEL) to[lane] = (char)s->floors[i];
    uint32_t *words = (uint32_t *)to + lane;
    for (int b = 0; b < f->each / STEP; b++, words += f->bits * PANEL)
        put_words(s->words + 8 * b, f->bits, words);
}

typedef struct {
    const Format *format;
    const uint8_t *rows;
    char *panels;
    int64_t first_out, outs, ins, size; /* size: of a panel */
} Packing;

static void pack_part(const void *what, int part, int parts) {
    const Packing *p = what;
    const Format *f = p->format;
    const int64_t blocks = p->ins / f->each;
    const int64_t begun = p->first_out / PANEL, panels = (p->first_out + p->outs - 1) / PANEL + 1 - begun;
    const int64_t from = (begun + panels * part / parts) * PANEL - p->first_out;
    const int64_t to = (begun + panels * (part + 1) / parts) * PANEL - p->first_out;
    Stored s;
    for (int64_t i = from < 0 ? 0 : from; i < (to < p->outs ? to : p->outs); i++) {
        const int64_t out = p->first_out + i;
        const uint8_t *row = p->rows + i * blocks * f->bytes;
        char *at = p->panels + out / PANEL * p->size;
        for (int64_t b = 0; b < blocks; b++, at += block_bytes(f) * PANEL) {
            read_stored(f, row + b * f->bytes, &s);
            put_stored(f, &s, at, (int)(out % PANEL));
        }
    }
}

/* Some rows of a tensor as a file has them, its outputs from first_out on, into its panels, which are
   0 before. */
EXPORT void pack(int64_t kind, const void *rows, void *panels, int64_t first_out, int64_t outs,
                 int64_t ins, int64_t threads) {
    const Weights w = {panels, kind};
    const Packing p = {format_of(kind), rows, panels, first_out, outs, ins, panel_size(&w, ins)};
    together(pack_part, &p, (int)threads);
}

/* ----------------------------------------------------------------------------------- out of them */

typedef uint32_t wide_words __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t loose_words __attribute__((vector_size(4 * WIDTH), aligned(1), may_alias));

INLINE wide_words words_at(const char *p) { return *(const loose_words *)p; }

INLINE wide halves_at(const char *p) {
    typedef uint16_t some __attribute__((vector_size(2 * WIDTH), aligned(1), may_alias));
    const some *bits = (const some *)p;
#if defined(__F16C__) && (HAS_ZMM || WIDTH == LANES)
    wide found;
    __asm__("vcvtph2ps %1, %0" : "=v"(found) : "m"(*bits));
    return found;
#else
    const wide_words whole = __builtin_convertvector(*bits, wide_words);
    const wide size = (wide)((whole & 0x7fff) << 13) * 0x1p112f; /* of fp16, finite */
    return (wide)((wide_words)size | (whole & 0x8000) << 16);
#endif
}

INLINE wide_ints bytes_at(const char *p) {
    typedef uint8_t some __attribute__((vector_size(WIDTH), aligned(1), may_alias));
#if defined(__AVX2__) && (HAS_ZMM || WIDTH == LANES)
    wide_ints found;
    __asm__("vpmovzxbd %1, %0" : "=v"(found) : "m"(*(const some *)p));
    return found;
#else
    return __builtin_convertvector(*(const some *)p, wide_ints);
#endif
}

/* Bits from `low` on of each byte, with a sign or without. */
INLINE wide counts_at(const char *p, int low, int bits, int is_signed) {
    const wide_ints at = bytes_at(p), found = is_signed ? at << 24 >> 24 : at >> low & ((1 << bits) - 1);
    return __builtin_convertvector(found, wide);
}

/* 2^(byte - 128), as ggml has it. */
INLINE wide powers_at(const char *p) {
    const wide_ints e = bytes_at(p), is_small = e < 2;
    return (wide)((is_small & 0x00200000 << (e & 1)) | (~is_small & (e - 1) << 23));
}

static const int8_t curve[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                 1,    13,   25,  38,  53,  69,  89,  113};
static const int8_t mxfp4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

/* Of each byte of places, 0 to 15, what stands there. */
INLINE wide_ints looked_up(const int8_t *table, wide_ints places) {
#if defined(__AVX2__) && (HAS_ZMM || WIDTH == LANES)
    typedef int8_t sixteen __attribute__((vector_size(16), aligned(1), may_alias));
    wide_ints found;
#if HAS_ZMM
    __asm__("vbroadcasti32x4 %1, %0" : "=v"(found) : "m"(*(const sixteen *)table));
#else
    __asm__("vbroadcasti128 %1, %0" : "=x"(found) : "m"(*(const sixteen *)table));
#endif
    __asm__("vpshufb %1, %0, %0" : "+v"(found) : "v"(places));
    return found;
#elif defined(__aarch64__)
    union {
        wide_ints whole;
        uint8x16_t part[2];
        int8x16_t found[2];
    } at = {places};
    for (int i = 0; i < 2; i++) at.found[i] = vqtbl1q_s8(vld1q_s8(table), at.part[i]);
    return at.whole;
#else
    int8_t each[4 * WIDTH];
    memcpy(each, &places, sizeof each);
    for (int i = 0; i < 4 * WIDTH; i++) each[i] = table[each[i] & 15];
    memcpy(&places, each, sizeof each);
    return places;
#endif
}

/* The words of 32 inputs, of numbers of `bits`, at p. */
INLINE void read_words(const char *p, int bits, const int8_t *table, wide_ints (*to)[VECTORS]) {
    const ptrdiff_t line = PANEL * 4;
    const int high = bits == 5 || bits == 6 ? 4 : 2;
    _Pragma("GCC unroll 4") for (int v = 0; v < VECTORS; v++, p += 4 * WIDTH) {
        const char *above = p;
        if (bits == 8)
            for (int g = 0; g < 8; g++)
                to[g][v] = (wide_ints)(words_at(p + g * line) ^ 0x01010101u * SIGN);
        if (bits >= 4 && bits < 8)
            _Pragma("GCC unroll 4") for (int n = 0; n < 4; n++, above += line) {
                const wide_words w = words_at(above);
                to[2 * n][v] = (wide_ints)(w & LOW), to[2 * n + 1][v] = (wide_ints)(w >> 4 & LOW);
            }
        if (bits == 2 || bits == 3 || bits == 6)
            _Pragma("GCC unroll 2") for (int u = 0; u < 2; u++, above += line) {
                const wide_words w = words_at(above);
                _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {
                    if (bits != 6) to[4 * u + i][v] = (wide_ints)(w >> 2 * i & 0x03030303);
                    else
                        to[4 * u + i][v] |= (wide_ints)(
                            (i < 2 ? w << (4 - 2 * i) : w >> (2 * i - 4)) & 0x30303030);
                }
            }
        if (bits == 3 || bits == 5) {
            const wide_words w = words_at(above);
            const uint32_t mask = 0x01010101u << high;
            _Pragma("GCC unroll 8") for (int g = 0; g < 8; g++)
                to[g][v] |= (wide_ints)((g < high ? w << (high - g) : w >> (g - high)) & mask);
        }
        if (table)
            for (int g = 0; g < 8; g++)
                to[g][v] = looked_up(table, to[g][v]) ^ (int32_t)(0x01010101u * SIGN);
    }
}

/* Asks for what is read a while after the `bytes` at p. */
INLINE void fetch(const char *p, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(p + AHEAD + i);
}

/* Blocks of 32 inputs. f is a constant where it is called. */
INLINE const char *read_small(const Format f, const char *p, int steps, Chunk *to) {
    const int8_t *table = f.values == CURVE ? curve : f.values == MXFP4 ? mxfp4 : NULL;
    const int head = f.values == MXFP4 ? 1 : 2 * (1 + f.has_floor), size = f.bits * 4 + head;
    for (int b = 0; b < steps; b++, p += size * PANEL) {
        fetch(p, size * PANEL);
        _Pragma("GCC unroll 4") for (int v = 0; v < VECTORS; v++) {
            const char *at = p + v * WIDTH * 2;
            to->scales[b][v] = f.values == MXFP4 ? powers_at(p + v * WIDTH) : halves_at(at);
            if (f.has_floor) to->floors[b][v] = halves_at(at + 2 * PANEL);
        }
        read_words(p + head * PANEL, f.bits, table, to->words[b]);
    }
    return p;
}

/* Blocks of 256 inputs, one of them. */
INLINE const char *read_large(const Format f, const char *p, Chunk *to) {
    const int8_t *table = f.values == CURVE ? curve : NULL;
    const int is_signed = !f.has_floor, is_both = f.bits == 2, deep = is_both ? 4 : 8;
    const int head = is_both ? 4 + f.parts : (2 + f.parts) * (1 + f.has_floor);
    const char *scales = p + 2 * PANEL * (1 + f.has_floor);
    const char *floors = is_both ? scales : scales + f.parts * PANEL;
    fetch(p, head * PANEL);
    _Pragma("GCC unroll 4") for (int v = 0; v < VECTORS; v++) {
        const char *at = p + v * WIDTH * 2;
        const wide scale = halves_at(at), floor = f.has_floor ? halves_at(at + 2 * PANEL) : scale;
        for (int i = 0; i < f.parts; i++) {
            const ptrdiff_t place = i * PANEL + v * WIDTH;
            to->scales[i][v] = scale * counts_at(scales + place, 0, deep, is_signed);
            if (f.has_floor)
                to->floors[i][v] = floor * counts_at(floors + place, is_both ? 4 : 0, deep, 0);
        }
    }
    p += head * PANEL;
    for (int b = 0; b < STEPS_DEEP; b++, p += f.bits * PANEL * 4) {
        fetch(p, f.bits * PANEL * 4);
        read_words(p, f.bits, table, to->words[b]);
    }
    return p;
}

const char *read_chunk(int64_t kind, const char *p, int steps, Chunk *to) {
    switch (kind - PACKED) {
#define SMALL(TYPE, ...) \
    case TYPE: return read_small((Format){__VA_ARGS__}, p, steps, to);
#define LARGE(TYPE, ...) \
    case TYPE: return read_large((Format){__VA_ARGS__}, p, to);
        SMALL(2, 4, 0, 0, 8, 32, 18, NO_TABLE)
        SMALL(3, 4, 0, 1, 0, 32, 20, NO_TABLE)
        SMALL(6, 5, 0, 0, 16, 32, 22, NO_TABLE)
        SMALL(7, 5, 0, 1, 0, 32, 24, NO_TABLE)
        SMALL(8, 8, 0, 0, 0, 32, 34, NO_TABLE)
        SMALL(20, 4, 0, 0, 0, 32, 18, CURVE)
        SMALL(39, 4, 0, 0, 0, 32, 17, MXFP4)
        LARGE(10, 2, 16, 1, 0, 256, 84, NO_TABLE)
        LARGE(11, 3, 16, 0, 4, 256, 110, NO_TABLE)
        LARGE(12, 4, 8, 1, 0, 256, 144, NO_TABLE)
        LARGE(13, 5, 8, 1, 0, 256, 176, NO_TABLE)
        LARGE(14, 6, 16, 0, 32, 256, 210, NO_TABLE)
        LARGE(23, 4, 8, 0, 0, 256, 136, CURVE)
    }
    return p;
}

/* Some outputs of a panel of packed weights [count, ins], their lanes from `places` on. */
static void unpack_lanes(const Weights *w, int64_t ins, const char *panel, const int64_t *places,
                         int64_t count, float *out) {
    const Format *f = format_of(w->kind);
    const int halves = f->parts == 16 ? 2 : 1, behind = f->values || f->bits == 8 ? SIGN : f->zero;
    const int8_t sign = f->values || f->bits == 8 ? 1 : 0;
    Chunk c;
    for (int64_t k = 0; k < ins; k += DEEP) {
        const int inputs = (int)(ins - k < DEEP ? ins - k : DEEP);
        panel = read_chunk(w->kind, panel, inputs / STEP, &c);
        for (int64_t i = 0; i < count; i++) {
            const int lane = (int)(places[i] % PANEL);
            for (int d = 0; d < inputs; d++) {
                const int part = d / (STEP / halves);
                const uint8_t byte = (uint8_t)(((const uint32_t *)c.words[d / STEP][d % STEP / 4])[lane] >>
                                               (d % 4 * 8));
                const int number = (sign && !SIGN ? (int8_t)byte : byte) - behind;
                const float scale = ((const float *)c.scales[part])[lane];
                const float floor = f->has_floor ? ((const float *)c.floors[part])[lane] : 0.0f;
                out[i * ins + k + d] = scale * (float)number + floor;
            }
        }
    }
}

static void unpack_float(const Weights *w, int64_t ins, int64_t place, float *out) {
    const char *panel = (const char *)w->panels + place / PANEL * panel_size(w, ins);
    const int64_t lane = place % PANEL;
    for (int64_t k = 0; k < ins; k++)
        out[k] = w->kind == FLOATS ? ((const float *)panel)[k * PANEL + lane]
                                   : widen_one(((const uint16_t *)panel)[(k / 2 * PANEL + lane) * 2 + k % 2]);
}

/* Outputs of a weight, in any order, as floats [count, ins]. */
EXPORT void unpack(const Weights *w, int64_t ins, const int64_t *places, int64_t count, float *out) {
    for (int64_t i = 0, end; i < count; i = end) {
        end = i + 1;
        if (!is_packed(w)) {
            unpack_float(w, ins, places[i], out + i * ins);
            continue;
        }
        const int64_t at = places[i] / PANEL;
        while (end < count && places[end] / PANEL == at) end++;
        const char *panel = (const char *)w->panels + at * panel_size(w, ins);
        unpack_lanes(w, ins, panel, places + i, end - i, out + i * ins);
    }
}
