/*
 * The interface of device/: the table of devices, and which addresses are allocated.
 */
#pragma once

#include "base/base.h"

/* ---- registry.c ---- */

_Static_assert(OPENREG_MAX_DEVICES <= 64, "orDevice.peers has a bit for every device");
struct orDevice {
  char name[64];
  char type[32];
  const orDeviceFactory *factory;
  orDeviceDesc desc;
  bool can_map;
  _Atomic uint64_t peers;    /* bit i: kernels may reach memory of device i */
  orAllocator allocators[3]; /* for the device, pageable host and pinned host */
};

/* Creates the devices with the defaults if no thread has, or sleeps while another thread does. The
 * error of a failed attempt is repeated, unless its cause may have passed (memory, the system). No
 * lock held. */
orError_t orDevicesInit(void);
/* The "openreg" device at an index; null out of range. Requires that orDevicesInit has
 * succeeded. */
orDevice *orDeviceAt(int index);
/* The first host device. */
orDevice *orHostDevice(void);
/* Fails for a pointer to no device. */
orError_t orDeviceIsValid(const orDevice *device);

/* Checks the result of the factory's function `call`, which cannot complete later. A number that it
 * cannot return becomes orErrorSystem, with a message that has the number. */
orError_t orFactoryResult(const orDeviceFactory *factory, const char *call, orError_t error);

/* ---- host.c ---- */

extern const orDeviceFactory orPlainHostFactory, orPinnedHostFactory;

/* ---- simulated.c ---- */

extern const orDeviceFactory orSimulatedFactory;
/* Whether it is an address of simulated device memory, allocated or not. */
bool orSimulatedHolds(const void *ptr);
/* Describes the memory at an address, for a signal handler. It is read without a lock, so it may be
 * wrong if a thread changes it meanwhile. */
typedef struct orTouched {
  int device;
  uintptr_t begin;
  size_t bytes; /* 0: nothing is allocated there */
  bool live;
  const orOrigin *origin; /* or null */
} orTouched;
/* Maps a file in place of the pages of an allocation, or its own pages again (-1). */
bool orSimulatedMapFile(void *ptr, size_t bytes, int descriptor);
/* Gives the pages of an allocation back to the system. */
void orSimulatedPunch(void *ptr, size_t bytes);
/* False if the address is not of simulated memory. */
bool orSimulatedAt(const void *ptr, orTouched *place);

/* ---- device.c ---- */

bool orDeviceReachesPeer(int device, int peer);
/* The error of the factory's function `call`, with a message if none was recorded since `before` =
 * orNotedErrors(). */
orError_t orDeviceFailed(const orDevice *device, const char *call, orError_t error,
                         uint64_t before);
/* Checks an address that the factory's function returned for new memory of `bytes`, or as the
 * kernel address of `ptr`: not null, within the address space, and aligned to OR_ALIGNMENT. */
enum { OR_ALIGNMENT = 16 };
orError_t orDeviceCheckAddress(const orDevice *device, const char *call, const void *address,
                               const void *ptr, size_t bytes);
/* Calls the factory's `map`, which exists. */
orError_t orDeviceMap(const orDevice *device, const void *ptr, size_t bytes, void **address);

/* Checks the index. No side effect but the creation of the devices. */
orError_t orDeviceCheck(int index);
/* The calling thread's current device. */
int orCurrentDevice(void);

/* ---- region.c ---- */

typedef struct orRegion {
  void *base;
  size_t size;
  orMemoryType type; /* Host: pinned; Device */
  int device;        /* -1 for host memory */
  bool registered;   /* by orHostRegister: not freed by this library */
  bool cached;       /* a segment of the caching allocator: a caller cannot free it */
  bool imported;     /* memory of another process: not charged here */
  int file;          /* its file, for sharing (shared_file.h); 0: none */
} orRegion;

/* The region that holds `ptr`; false if none does. */
bool orRegionFind(const void *ptr, orRegion *region);
/* Whether a region of this type holds `ptr`. */
bool orRegionIs(const void *ptr, orMemoryType type);
/* Adds a region. Fails if it overlaps another. */
orError_t orRegionEnter(orRegion region);
/* Adds memory that the factory's function `call` returned, or gives it back to the factory. */
orError_t orRegionAdopt(const orDevice *device, const char *call, orRegion region);
/* The region of this kind that starts at `ptr`, or orErrorInvalidValue. The second removes it. */
orError_t orRegionCheck(const void *ptr, orMemoryType type, bool registered, orRegion *region);
orError_t orRegionTake(const void *ptr, orMemoryType type, bool registered, orRegion *region);
/* Device memory, charged to the device's capacity, on any current device. Does not synchronise. */
orError_t orRegionAllocate(int device, size_t bytes, bool cached, void **ptr);
/* Addresses of a simulated device for a segment that another process has sent, with an entry for
 * them. The memory is mapped by the caller. */
orError_t orRegionImport(int device, size_t bytes, int file, void **ptr);
/* The caller guarantees that no queued work uses the region. */
orError_t orRegionRelease(void *ptr);
/* Bytes in use on a device. */
size_t orRegionUsed(int device);
