/* The blocks of a GGUF file in panels: how they lie there, and how they are read.

   A block is 32 or 256 inputs of one output. A panel has for each block first the scales of all its
   outputs, then, 32 inputs at a time, their numbers: a word of a lane is four bytes, of four inputs
   one behind the other, so that the 32 inputs are words 0 to 7.
   4 bits: of words 2n the lower halves of the bytes, of words 2n + 1 the upper ones. 2 bits: of words
   4n + i the bits 2i and 2i + 1. 1 bit: of word g bit g. 8 bits: as they are. Numbers of 5 bits are 4
   and 1, of 3 bits 2 and 1. 6 bits: three words in the lower bits of three lines, and of the fourth two
   bits above each of them, the last line's the lowest. */

#pragma once

#include "weights.h"

#define STEP 32     /* inputs that the numbers of a block are counted by */
#define DEEP 256    /* inputs that are read at a time, at most */
#define STEPS_DEEP (DEEP / STEP)

/* How a type of ggml is stored; reading.h has all. Scales are of fp16, one a block; with parts so many whole numbers to
   multiply it by, of 8 bits, that each have an equal part of the inputs. */
typedef struct {
    int8_t bits;      /* of a number; 0: no such type */
    uint8_t parts;    /* 0, 8 or 16 */
    int8_t has_floor; /* a second fp16, and with parts as many numbers for it */
    uint8_t zero;     /* the number that stands for 0, of types without floors and tables */
    int16_t each, bytes; /* inputs and bytes of a block in a file */
    int8_t values;    /* of a table that 4 bits are places in: 0 is none */
} Format;

/* Tables; a scale of MXFP4 is a byte, a power of two. */
enum { NO_TABLE, CURVE, MXFP4 };

const Format *format_of(int64_t kind); /* NULL for kinds that are not packed */

/* Outputs of a weight of any kind, in any order, as floats [count, ins]. */
void unpack(const Weights *w, int64_t ins, const int64_t *places, int64_t count, float *out);
