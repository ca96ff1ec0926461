/*
 * Whether a faulting access of an Arm64 processor was a write. Pure functions, which compile for
 * every processor.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/base.h"

typedef enum orA64Access {
  OR_A64_READS,
  OR_A64_WRITES,
  OR_A64_BOTH,   /* an atomic operation reads and writes the same bytes */
  OR_A64_UNKNOWN /* no load or store, or one that reads and writes different bytes */
} orA64Access;

/* What an instruction of the A64 set does to memory. */
orA64Access orA64Decode(uint32_t instruction) OR_HIDDEN;

/* `records`: the signal frame's (uc_mcontext.__reserved). `otherwise`: the answer if neither they
 * nor the instruction give one. */
bool orA64Wrote(const void *records, size_t bytes, uint32_t instruction, bool otherwise) OR_HIDDEN;
