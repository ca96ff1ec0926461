/*
 * Whether an access that faulted on Arm64 was a write. The library exports no such function, so it
 * is compiled into the tests: on every processor.
 */
#include "../../csrc/openreg/tools/a64.c"
#include "harness.h"

/* As an assembler encodes them: each class of loads and stores, and what is neither. */
static const struct {
  uint32_t word;
  orA64Access access;
  const char *text;
} instructions[] = {
    /* clang-format off */
    {0xC8007C41, OR_A64_WRITES, "stxr w0, x1, [x2]"},
    {0xC85F7C41, OR_A64_READS, "ldxr x1, [x2]"},
    {0xC8208C41, OR_A64_WRITES, "stlxp w0, x1, x3, [x2]"},
    {0xC87F8C41, OR_A64_READS, "ldaxp x1, x3, [x2]"},
    {0xC89FFC41, OR_A64_WRITES, "stlr x1, [x2]"},
    {0x88DFFC41, OR_A64_READS, "ldar w1, [x2]"},
    {0xC8A07C41, OR_A64_BOTH, "cas x0, x1, [x2]"},
    {0x88E0FC41, OR_A64_BOTH, "casal w0, w1, [x2]"},
    {0x48607C44, OR_A64_BOTH, "caspa x0, x1, x4, x5, [x2]"},
    {0xF8200041, OR_A64_BOTH, "ldadd x0, x1, [x2]"},
    {0x38E02041, OR_A64_BOTH, "ldeoralb w0, w1, [x2]"},
    {0xF8208041, OR_A64_BOTH, "swp x0, x1, [x2]"},
    {0xB820005F, OR_A64_BOTH, "stadd w0, [x2]"},
    {0xF8BFC041, OR_A64_READS, "ldapr x1, [x2]"},
    {0x99404041, OR_A64_READS, "ldapur w1, [x2, #4]"},
    {0x99800041, OR_A64_READS, "ldapursw x1, [x2]"},
    {0x19001041, OR_A64_WRITES, "stlurb w1, [x2, #1]"},
    {0xF83F9040, OR_A64_WRITES, "st64b x0, [x2]"},
    {0xF83FD040, OR_A64_READS, "ld64b x0, [x2]"},
    {0xF8200441, OR_A64_READS, "ldraa x1, [x2]"},
    {0x58000000, OR_A64_READS, "ldr x0, ."},
    {0xF9800040, OR_A64_READS, "prfm pldl1keep, [x2]"},
    {0xF8A36850, OR_A64_READS, "prfm pstl1keep, [x2, x3]"},
    {0xA9010440, OR_A64_WRITES, "stp x0, x1, [x2, #16]"},
    {0xACC10440, OR_A64_READS, "ldp q0, q1, [x2], #32"},
    {0x28000440, OR_A64_WRITES, "stnp w0, w1, [x2]"},
    {0x69400440, OR_A64_READS, "ldpsw x0, x1, [x2]"},
    {0x69000440, OR_A64_WRITES, "stgp x0, x1, [x2]"},
    {0xF9000440, OR_A64_WRITES, "str x0, [x2, #8]"},
    {0xF8636840, OR_A64_READS, "ldr x0, [x2, x3]"},
    {0x38001440, OR_A64_WRITES, "strb w0, [x2], #1"},
    {0x38C01C40, OR_A64_READS, "ldrsb w0, [x2, #1]!"},
    {0xB9800440, OR_A64_READS, "ldrsw x0, [x2, #4]"},
    {0xF81F8040, OR_A64_WRITES, "stur x0, [x2, #-8]"},
    {0xB85FC040, OR_A64_READS, "ldur w0, [x2, #-4]"},
    {0xF8000840, OR_A64_WRITES, "sttr x0, [x2]"},
    {0xB8800840, OR_A64_READS, "ldtrsw x0, [x2]"},
    {0x3D800440, OR_A64_WRITES, "str q0, [x2, #16]"},
    {0x3DC00440, OR_A64_READS, "ldr q0, [x2, #16]"},
    {0x3C236840, OR_A64_WRITES, "str b0, [x2, x3]"},
    {0xFC408440, OR_A64_READS, "ldr d0, [x2], #8"},
    {0x3C9F0040, OR_A64_WRITES, "stur q0, [x2, #-16]"},
    {0x4C007040, OR_A64_WRITES, "st1 {v0.16b}, [x2]"},
    {0x4CDFA040, OR_A64_READS, "ld1 {v0.16b, v1.16b}, [x2], #32"},
    {0x0D20B040, OR_A64_WRITES, "st4 {v0.s, v1.s, v2.s, v3.s}[1], [x2]"},
    {0x4D40C840, OR_A64_READS, "ld1r {v0.4s}, [x2]"},
    {0xE400E040, OR_A64_WRITES, "st1b {z0.b}, p0, [x2]"},
    {0xA5E0A040, OR_A64_READS, "ld1d {z0.d}, p0/z, [x2]"},
    {0xE5804040, OR_A64_WRITES, "str z0, [x2]"},
    {0x85C00040, OR_A64_READS, "prfb pldl1keep, p0, [x2]"},
    {0xE5418040, OR_A64_WRITES, "st1w {z0.s}, p0, [x2, z1.s, uxtw]"},
    {0xE09F0040, OR_A64_READS, "ld1w {za0h.s[w12, 0]}, p0/z, [x2]"},
    {0xE0BF0040, OR_A64_WRITES, "st1w {za0h.s[w12, 0]}, p0, [x2]"},
    {0xD9200840, OR_A64_WRITES, "stg x0, [x2]"},
    {0xD9600040, OR_A64_READS, "ldg x0, [x2]"},
    {0xD9200040, OR_A64_WRITES, "stzgm x0, [x2]"},
    {0x19C20420, OR_A64_WRITES, "setp [x0]!, x1!, x2"},
    {0x1D010440, OR_A64_UNKNOWN, "cpyp [x0]!, [x1]!, x2!"},
    {0xD50B7422, OR_A64_WRITES, "dc zva, x2"},
    {0xD50B7A22, OR_A64_UNKNOWN, "dc cvac, x2"},
    {0xD50B7462, OR_A64_WRITES, "dc gva, x2"},
    {0x8B020020, OR_A64_UNKNOWN, "add x0, x1, x2"},
    {0x14000000, OR_A64_UNKNOWN, "b ."},
    /* clang-format on */
};

TEST(a64_decodes_loads_and_stores) {
  for (size_t i = 0; i < sizeof instructions / sizeof instructions[0]; i++)
    if (orA64Decode(instructions[i].word) != instructions[i].access)
      FAIL("%s is taken for %d, not %d", instructions[i].text, orA64Decode(instructions[i].word),
           instructions[i].access);
}

enum { LOAD = 0xF9400440, STORE = 0xF9000440, SWAP = 0xF8208041, ADD = 0x8B020020 };

/* A frame: another record, of 528 bytes, and the syndrome. */
typedef struct Frame {
  unsigned char bytes[1024];
} Frame;

static Frame frameWith(uint64_t esr) {
  Frame frame = {{0}};
  memcpy(frame.bytes, &(orRecord){.magic = 0x46508001, .size = 528}, sizeof(orRecord));
  memcpy(frame.bytes + 528, &(orRecord){OR_ESR_MAGIC, sizeof(orRecord), esr}, sizeof(orRecord));
  return frame;
}

static bool wrote(const Frame *frame, uint32_t instruction) {
  return orA64Wrote(frame->bytes, sizeof frame->bytes, instruction, false);
}

/* The syndromes are a kernel's, of a page without permission: of a load, of a store, of cache
 * maintenance. */
TEST(a64_reads_the_record_first) {
  Frame reads = frameWith(0x9200000F), writes = frameWith(0x9200004F),
        cleans = frameWith(0x9200014F);
  ASSERT(wrote(&writes, ADD) && wrote(&writes, LOAD));
  ASSERT(!wrote(&reads, ADD) && !wrote(&reads, STORE));
  ASSERT(!wrote(&cleans, ADD));
  ASSERT(wrote(&reads, SWAP)); /* the read comes first, and faults */
}

TEST(a64_decodes_without_a_record) {
  Frame none = {{0}};
  ASSERT(wrote(&none, STORE) && wrote(&none, SWAP) && !wrote(&none, LOAD) && !wrote(&none, ADD));
  ASSERT(orA64Wrote(none.bytes, sizeof none.bytes, ADD, true));
}

/* Not past its end, and not for ever. */
TEST(a64_reads_a_broken_frame) {
  uint32_t sizes[] = {0, 4, 2000, UINT32_MAX};
  for (int i = 0; i < 4; i++) {
    Frame broken = frameWith(0x9200004F);
    memcpy(broken.bytes + 4, &sizes[i], 4);
    ASSERT(!wrote(&broken, ADD));
  }
  Frame cut = frameWith(0x9200004F);
  ASSERT(!orA64Wrote(cut.bytes, 528 + 8, ADD, false));
}
