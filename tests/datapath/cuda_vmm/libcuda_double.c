// The driver's library over memfds, made from the driver's own header: what ctypes hands over is what the header says,
// or a call fails. Two GPUs, of which the first one reads the second one's memory.
#define _GNU_SOURCE
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define UNIT (1 << 16)
#define GPUS 2
#define MOST 256
#define CHECK(condition) do { if (!(condition)) return CUDA_ERROR_INVALID_VALUE; } while (0)
#define CONTEXT(device) ((CUcontext)(uintptr_t)(0x100 + (device)))
#define IN_CONTEXT do { if (!depth) return CUDA_ERROR_INVALID_CONTEXT; } while (0)
#define MAY_FAIL do { if (!strcmp(failing, __func__) && !--fails_at) return (CUresult)12345; } while (0)

struct allocation { int fd, references, device; };
struct mapping { CUdeviceptr at; size_t nbytes; int handle; CUmemAccess_flags flags; };
struct event { int recorded; };

static struct allocation allocations[MOST];  // a handle is an index and one
static struct mapping mappings[MOST];
static int ready;
static __thread int depth;  // contexts that this thread has pushed
int events_left;
char failing[64];  // the call that fails
int fails_at;      // which one of them, from 1
int of_host;       // whether memory that comes by a descriptor is the host's
size_t range_more; // bytes that a range has more than its allocation

int contexts_left(void) { return depth; }

int handles_left(void) {
  int count = 0;
  for (int i = 0; i < MOST; ++i) count += allocations[i].references > 0;
  return count;
}

int mappings_left(void) {
  int count = 0;
  for (int i = 0; i < MOST; ++i) count += mappings[i].at != 0;
  return count;
}

static CUresult new_handle(CUmemGenericAllocationHandle *handle, int fd, int device) {
  for (int i = 0; i < MOST; ++i)
    if (!allocations[i].references) {
      allocations[i] = (struct allocation){fd, 1, device};
      *handle = i + 1;
      return CUDA_SUCCESS;
    }
  return CUDA_ERROR_OUT_OF_MEMORY;
}

static struct allocation *of(CUmemGenericAllocationHandle handle) {
  return handle > 0 && handle <= MOST && allocations[handle - 1].references ? &allocations[handle - 1] : NULL;
}

static struct mapping *holding(CUdeviceptr address) {
  for (int i = 0; i < MOST; ++i)
    if (mappings[i].at && mappings[i].at <= address && address < mappings[i].at + mappings[i].nbytes)
      return &mappings[i];
  return NULL;
}

static int sane(const CUmemAllocationProp *prop) {
  static const unsigned char zeros[sizeof prop->allocFlags.reserved];
  return prop->type == CU_MEM_ALLOCATION_TYPE_PINNED && prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
         prop->location.id >= 0 && prop->location.id < GPUS && prop->win32HandleMetaData == NULL &&
         prop->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR &&
         prop->allocFlags.compressionType == 0 && prop->allocFlags.gpuDirectRDMACapable == 1 &&
         prop->allocFlags.usage == 0 && !memcmp(prop->allocFlags.reserved, zeros, sizeof zeros);
}

CUresult cuInit(unsigned flags) { CHECK(!flags); ready = 1; return CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult error, const char **name) {
  switch (error) {
    case CUDA_ERROR_INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; return CUDA_SUCCESS;
    case CUDA_ERROR_INVALID_CONTEXT: *name = "CUDA_ERROR_INVALID_CONTEXT"; return CUDA_SUCCESS;
    default: *name = NULL; return CUDA_ERROR_INVALID_VALUE;
  }
}
CUresult cuDeviceGetCount(int *count) { CHECK(ready); *count = GPUS; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  CHECK(ordinal >= 0 && ordinal < GPUS); *device = ordinal; return CUDA_SUCCESS;
}
CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) { memset(uuid, device + 1, sizeof *uuid); return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
  CHECK(which == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED && device < GPUS);
  *value = 1;
  return CUDA_SUCCESS;
}
CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice other) { *can = device < other; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = CONTEXT(device); return CUDA_SUCCESS; }
CUresult cuCtxPushCurrent_v2(CUcontext context) {
  CHECK(context == CONTEXT(0) || context == CONTEXT(1)); ++depth; return CUDA_SUCCESS;
}
CUresult cuCtxPopCurrent_v2(CUcontext *context) { IN_CONTEXT; --depth; *context = CONTEXT(0); return CUDA_SUCCESS; }
CUresult cuMemGetAllocationGranularity(size_t *unit, const CUmemAllocationProp *prop,
                                       CUmemAllocationGranularity_flags which) {
  CHECK(sane(prop) && which == CU_MEM_ALLOC_GRANULARITY_MINIMUM); *unit = UNIT; return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t nbytes, const CUmemAllocationProp *prop,
                     unsigned long long flags) {
  CHECK(sane(prop) && nbytes && nbytes % UNIT == 0 && !flags);
  int fd = memfd_create(prop->location.id ? "device1" : "device0", MFD_CLOEXEC);
  CHECK(fd >= 0 && !ftruncate(fd, nbytes));
  return new_handle(handle, fd, prop->location.id);
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  MAY_FAIL;
  struct allocation *found = of(handle);
  CHECK(found);
  if (!--found->references) close(found->fd);
  return CUDA_SUCCESS;
}
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
  struct mapping *found = holding((CUdeviceptr)address);
  CHECK(found);
  allocations[found->handle - 1].references++;
  *handle = found->handle;
  return CUDA_SUCCESS;
}
CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle) {
  MAY_FAIL;
  CHECK(of(handle));
  memset(prop, 0, sizeof *prop);
  prop->type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop->requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  prop->location.type = of_host ? CU_MEM_LOCATION_TYPE_HOST : CU_MEM_LOCATION_TYPE_DEVICE;
  prop->location.id = of(handle)->device;
  return CUDA_SUCCESS;
}
CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *nbytes, CUdeviceptr address) {
  IN_CONTEXT;
  struct mapping *found = holding(address);
  CHECK(found);
  *base = found->at, *nbytes = found->nbytes + range_more;
  return CUDA_SUCCESS;
}
CUresult cuMemExportToShareableHandle(void *fd, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                                      unsigned long long flags) {
  CHECK(of(handle) && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && !flags);
  *(int *)fd = dup(of(handle)->fd);
  return CUDA_SUCCESS;
}
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *fd,
                                        CUmemAllocationHandleType type) {
  struct stat found;
  char link[32], name[32] = "";
  CHECK(type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && !fstat((int)(uintptr_t)fd, &found) && S_ISREG(found.st_mode));
  snprintf(link, sizeof link, "/proc/self/fd/%d", (int)(uintptr_t)fd);
  CHECK(readlink(link, name, sizeof name - 1) > 0);
  return new_handle(handle, dup((int)(uintptr_t)fd), strstr(name, "device1") != NULL);
}
CUresult cuMemAddressReserve(CUdeviceptr *address, size_t nbytes, size_t alignment, CUdeviceptr hint,
                             unsigned long long flags) {
  CHECK(nbytes % UNIT == 0 && !alignment && !hint && !flags);
  void *made = mmap(NULL, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (made == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = (CUdeviceptr)made;
  return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr address, size_t nbytes) {
  CHECK(!holding(address)); munmap((void *)address, nbytes); return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr address, size_t nbytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
  struct stat found;
  CHECK(of(handle) && !offset && !flags && !fstat(of(handle)->fd, &found) && (size_t)found.st_size >= nbytes);
  for (int i = 0; i < MOST; ++i)
    if (!mappings[i].at) {
      mappings[i] = (struct mapping){address, nbytes, (int)handle, CU_MEM_ACCESS_FLAGS_PROT_NONE};
      of(handle)->references++;
      return CUDA_SUCCESS;
    }
  return CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemUnmap(CUdeviceptr address, size_t nbytes) {
  MAY_FAIL;
  struct mapping *found = holding(address);
  CHECK(found && found->at == address && found->nbytes == nbytes);
  CUmemGenericAllocationHandle handle = found->handle;
  memset(found, 0, sizeof *found);
  return cuMemRelease(handle);
}
CUresult cuMemSetAccess(CUdeviceptr address, size_t nbytes, const CUmemAccessDesc *access, size_t count) {
  struct mapping *found = holding(address);
  CHECK(found && found->nbytes == nbytes && count == 1 && access->location.type == CU_MEM_LOCATION_TYPE_DEVICE);
  CHECK(access->location.id >= 0 && access->location.id < GPUS);
  int allowed = access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? PROT_READ | PROT_WRITE : PROT_READ;
  CHECK(access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE || access->flags == CU_MEM_ACCESS_FLAGS_PROT_READ);
  void *made = mmap((void *)address, nbytes, allowed, MAP_SHARED | MAP_FIXED, allocations[found->handle - 1].fd, 0);
  return made == (void *)address ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}
CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
  IN_CONTEXT; MAY_FAIL; CHECK(flags == CU_STREAM_NON_BLOCKING); *stream = (CUstream)0x200; return CUDA_SUCCESS;
}
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t nbytes, CUstream stream) {
  IN_CONTEXT;
  CHECK(stream == (CUstream)0x200);
  MAY_FAIL;
  memcpy((void *)to, (void *)from, nbytes);
  return CUDA_SUCCESS;
}
CUresult cuEventCreate(CUevent *event, unsigned flags) {
  IN_CONTEXT;
  MAY_FAIL;
  CHECK(flags == (CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING));
  *event = calloc(1, sizeof(struct event));
  ++events_left;
  return CUDA_SUCCESS;
}
CUresult cuEventRecord(CUevent event, CUstream stream) {
  IN_CONTEXT; MAY_FAIL; CHECK(stream == (CUstream)0x200); ((struct event *)event)->recorded = 1; return CUDA_SUCCESS;
}
CUresult cuEventSynchronize(CUevent event) {
  IN_CONTEXT; MAY_FAIL; CHECK(((struct event *)event)->recorded); return CUDA_SUCCESS;
}
CUresult cuEventDestroy_v2(CUevent event) { IN_CONTEXT; free(event); --events_left; return CUDA_SUCCESS; }
