#include "tools/a64.h"

#include <string.h>

/* ---- the instruction: "Loads and Stores" of the Arm Architecture Reference Manual ---- */

static bool is(uint32_t word, uint32_t mask, uint32_t value) { return (word & mask) == value; }

static bool bit(uint32_t word, int number) { return word >> number & 1; }

/* Most classes have L, which is set for a load. */
static orA64Access byL(uint32_t word) { return bit(word, 22) ? OR_A64_READS : OR_A64_WRITES; }

/* LDXR, STXR, LDXP, STXP, LDAR, STLR; CAS and CASP, where bit 22 is part of the order. */
static orA64Access exclusive(uint32_t word) {
  bool pair = !bit(word, 23) && bit(word, 31);
  return bit(word, 21) && !pair ? OR_A64_BOTH : byL(word);
}

/* LDADD, SWP and the like; LDAPR; LD64B and ST64B. */
static orA64Access atomic(uint32_t word) {
  unsigned operation = word >> 12 & 15;
  if (operation == 12 || operation == 13) return OR_A64_READS;
  bool is_64_bytes = word >> 30 == 3 && operation >= 9 && operation <= 11;
  return is_64_bytes ? OR_A64_WRITES : OR_A64_BOTH;
}

/* LDR, STR and their kin. Of SIMD registers opc is 0 and 2 for stores, of others 0 alone. */
static orA64Access single(uint32_t word) {
  if (bit(word, 26)) return byL(word);
  return word >> 22 & 3 ? OR_A64_READS : OR_A64_WRITES;
}

static orA64Access ofRegister(uint32_t word) {
  if (bit(word, 24) || !bit(word, 21)) return single(word);
  switch (word >> 10 & 3) {
    case 0:
      return atomic(word);
    case 2:
      return single(word);
    default:
      return OR_A64_READS; /* LDRAA */
  }
}

/* Atomics of 128 bits; memory tags; LDAPUR and STLUR; LDIAPP and STILP; CPY and SET. */
static orA64Access ordered(uint32_t word) {
  unsigned form = word >> 10 & 3, opc = word >> 22 & 3;
  bool is_tags = word >> 30 == 3 && !bit(word, 26);
  if (bit(word, 21)) {
    if (!is_tags) return OR_A64_BOTH;
    return form == 0 ? byL(word) : OR_A64_WRITES;
  }
  if (form == 1) return opc == 3 ? OR_A64_WRITES : OR_A64_UNKNOWN;
  return form == 0 ? single(word) : byL(word);
}

static const struct {
  uint32_t mask, value;
  orA64Access (*decode)(uint32_t word);
} classes[] = {
    {0xBE000000, 0x0C000000, byL},                                       /* LD1 to ST4 */
    {0x3F000000, 0x08000000, exclusive},  {0x3A000000, 0x28000000, byL}, /* pairs */
    {0x3A000000, 0x38000000, ofRegister}, {0x3B000000, 0x19000000, ordered},
};

static const struct {
  uint32_t mask, value;
  orA64Access access;
} fixed[] = {
    {0x3B000000, 0x18000000, OR_A64_READS},  /* LDR of a literal, PRFM */
    {0xFFFFFFE0, 0xD50B7420, OR_A64_WRITES}, /* DC ZVA */
    {0xFFFFFFE0, 0xD50B7460, OR_A64_WRITES}, /* DC GVA */
    {0xFFFFFFE0, 0xD50B7480, OR_A64_WRITES}, /* DC GZVA */
    {0xFE000000, 0xE4000000, OR_A64_WRITES}, /* SVE */
    {0xFE000000, 0x84000000, OR_A64_READS},  {0xFE000000, 0xA4000000, OR_A64_READS},
    {0xFE000000, 0xC4000000, OR_A64_READS},  {0xBE200000, 0xA0200000, OR_A64_WRITES}, /* SME */
    {0xBE200000, 0xA0000000, OR_A64_READS},
};

orA64Access orA64Decode(uint32_t instruction) {
  for (size_t i = 0; i < sizeof classes / sizeof classes[0]; i++)
    if (is(instruction, classes[i].mask, classes[i].value)) return classes[i].decode(instruction);
  for (size_t i = 0; i < sizeof fixed / sizeof fixed[0]; i++)
    if (is(instruction, fixed[i].mask, fixed[i].value)) return fixed[i].access;
  return OR_A64_UNKNOWN;
}

/* ---- the signal frame ---- */

/* <asm/sigcontext.h> has these for Arm64 alone. */
enum { OR_ESR_MAGIC = 0x45535201, OR_ESR_WRITE = 1 << 6, OR_ESR_CACHE = 1 << 8 };

typedef struct orRecord {
  uint32_t magic, size;
  uint64_t esr; /* present in a record with OR_ESR_MAGIC */
} orRecord;

/* The fault's syndrome; false if no record has it. A record of magic 0 is the last. */
static bool findSyndrome(const unsigned char *records, size_t bytes, uint64_t *esr) {
  orRecord r;
  for (size_t at = 0; bytes - at >= sizeof r; at += r.size) {
    memcpy(&r, records + at, sizeof r);
    if (r.magic == OR_ESR_MAGIC && r.size >= sizeof r) return *esr = r.esr, true;
    if (!r.magic || r.size < offsetof(orRecord, esr) || r.size > bytes - at) return false;
  }
  return false;
}

/* In the syndrome, an atomic operation on an unreadable page counts as a read. Cache maintenance in
 * the kernel does too, though its bit is set for a write. */
bool orA64Wrote(const void *records, size_t bytes, uint32_t instruction, bool otherwise) {
  uint64_t esr;
  orA64Access access = orA64Decode(instruction);
  if (access == OR_A64_BOTH) return true;
  if (findSyndrome(records, bytes, &esr)) return esr & OR_ESR_WRITE && !(esr & OR_ESR_CACHE);
  return access == OR_A64_UNKNOWN ? otherwise : access == OR_A64_WRITES;
}
