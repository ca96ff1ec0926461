#include "tools/a64.h"

#include <string.h>

/* ---- the instruction: "Loads and Stores" of the Arm Architecture Reference Manual ---- */

/* The first row that matches decides. */
static const struct {
  uint32_t mask, value;
  orA64Access access;
} rows[] = {
    /* LD1 to ST4 */
    {0xBE400000, 0x0C400000, OR_A64_READS},
    {0xBE400000, 0x0C000000, OR_A64_WRITES},
    /* CAS and CASP; LDXR, STXR, LDXP, STXP, LDAR, STLR */
    {0x3FA00000, 0x08A00000, OR_A64_BOTH},
    {0xBFA00000, 0x08200000, OR_A64_BOTH},
    {0x3F400000, 0x08400000, OR_A64_READS},
    {0x3F400000, 0x08000000, OR_A64_WRITES},
    /* pairs */
    {0x3A400000, 0x28400000, OR_A64_READS},
    {0x3A400000, 0x28000000, OR_A64_WRITES},
    /* LDAPR and LD64B; ST64B; LDADD, SWP and the like; LDRAA */
    {0x3B20EC00, 0x3820C000, OR_A64_READS},
    {0xFB20EC00, 0xF820A000, OR_A64_WRITES},
    {0xFB20FC00, 0xF8209000, OR_A64_WRITES},
    {0x3B200C00, 0x38200000, OR_A64_BOTH},
    {0x3B200400, 0x38200400, OR_A64_READS},
    /* LDR, STR and their kin, of SIMD registers and of others */
    {0x3E400000, 0x3C400000, OR_A64_READS},
    {0x3E400000, 0x3C000000, OR_A64_WRITES},
    {0x3EC00000, 0x38000000, OR_A64_WRITES},
    {0x3E000000, 0x38000000, OR_A64_READS},
    /* memory tags; atomics of 128 bits; SET and CPY */
    {0xFF600C00, 0xD9600000, OR_A64_READS},
    {0xFF200000, 0xD9200000, OR_A64_WRITES},
    {0x3B200000, 0x19200000, OR_A64_BOTH},
    {0x3BE00C00, 0x19C00400, OR_A64_WRITES},
    {0x3B200C00, 0x19000400, OR_A64_UNKNOWN},
    /* LDAPUR and STLUR, of SIMD registers and of others; LDIAPP and STILP */
    {0x3F600400, 0x1D400000, OR_A64_READS},
    {0x3F600400, 0x1D000000, OR_A64_WRITES},
    {0x3FE00C00, 0x19000000, OR_A64_WRITES},
    {0x3F200C00, 0x19000000, OR_A64_READS},
    {0x3B600000, 0x19400000, OR_A64_READS},
    {0x3B600000, 0x19000000, OR_A64_WRITES},
    /* LDR of a literal, PRFM; DC ZVA, DC GVA, DC GZVA */
    {0x3B000000, 0x18000000, OR_A64_READS},
    {0xFFFFFFE0, 0xD50B7420, OR_A64_WRITES},
    {0xFFFFFFE0, 0xD50B7460, OR_A64_WRITES},
    {0xFFFFFFE0, 0xD50B7480, OR_A64_WRITES},
    /* SVE; SME */
    {0xFE000000, 0xE4000000, OR_A64_WRITES},
    {0xFE000000, 0x84000000, OR_A64_READS},
    {0xFE000000, 0xA4000000, OR_A64_READS},
    {0xFE000000, 0xC4000000, OR_A64_READS},
    {0xBE200000, 0xA0200000, OR_A64_WRITES},
    {0xBE200000, 0xA0000000, OR_A64_READS},
};

orA64Access orA64Decode(uint32_t instruction) {
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
    if ((instruction & rows[i].mask) == rows[i].value) return rows[i].access;
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
