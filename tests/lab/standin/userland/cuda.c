/* SPDX-License-Identifier: GPL-3.0-or-later */
/*
 * Stand-in for libcuda.so.1: the driver API a compute check needs. It opens the nodes the real library opens, so a
 * process that uses it holds the driver; it computes one kernel, by knowing its name rather than its code:
 *   gpufleet_axpy(u64 x, u64 y, u32 a, u32 n):  y[i] = a * x[i] + y[i]  over uint32, wrapping
 *
 * Knobs (append ".<gpu>" for one GPU):
 *   cuda_init=CODE   what cuInit returns: 801 not supported, 802 system not ready, 803 mismatch, 100 no device, ...
 *   cuda_error.<function>=CODE  cuda_hang.<function>=1   (names without _v2)
 *   cuda_wrong=1     the kernel gets one element wrong
 */
#include "standin.h"

#include <ctype.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

typedef int Result;
typedef int CUdevice;
typedef unsigned long long DevicePointer;
enum {
	SUCCESS = 0,
	INVALID_VALUE = 1,
	OUT_OF_MEMORY = 2,
	NOT_INITIALIZED = 3,
	NO_DEVICE = 100,
	INVALID_DEVICE = 101,
	INVALID_IMAGE = 200,
	INVALID_CONTEXT = 201,
	DEVICE_UNAVAILABLE = 46,
	INVALID_PTX = 218,
	INVALID_HANDLE = 400,
	NOT_FOUND = 500,
	SYSTEM_DRIVER_MISMATCH = 803,
	UNKNOWN = 999,
};
enum { COMPUTE_DEFAULT, COMPUTE_EXCLUSIVE_THREAD, COMPUTE_PROHIBITED, COMPUTE_EXCLUSIVE_PROCESS };

struct context {
	CUdevice device;
	int node;  /* file descriptor of /dev/nvidiaN */
	int users;
};

struct function {
	char name[64];
};

struct allocation {
	struct allocation *next;
	CUdevice device;
	size_t size;
	unsigned char *bytes;
};

static int initialized, control = -1, uvm = -1;
static struct standin_gpu gpus[STANDIN_MAX_GPUS];
#define MAX_DEVICES 16
static struct {
	int gpu;       /* of the module */
	char uuid[64]; /* of the GPU or of the MIG device */
} seen[MAX_DEVICES]; /* by CUDA device */
static int devices;
static struct context primary[MAX_DEVICES];
static __thread struct context *current;
static struct allocation *allocations;

static Result fault(const char *function, CUdevice device)
{
	return standin_fault("cuda", function, device < 0 ? -1 : seen[device].gpu);
}

#define TRY(expression)                                                                                                \
	do {                                                                                                           \
		Result tried = (expression);                                                                           \
		if (tried)                                                                                             \
			return tried;                                                                                  \
	} while (0)

static Result valid(CUdevice device)
{
	if (!initialized)
		return NOT_INITIALIZED;
	return device < 0 || device >= devices ? INVALID_DEVICE : SUCCESS;
}

static Result entered(const char *function)
{
	if (!initialized)
		return NOT_INITIALIZED;
	return current ? fault(function, current->device) : INVALID_CONTEXT;
}

/* --- errors ------------------------------------------------------------------------------------------------------- */

static const struct {
	Result code;
	const char *name, *text;
} errors[] = {
	{SUCCESS, "CUDA_SUCCESS", "no error"},
	{INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
	{OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
	{NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
	{DEVICE_UNAVAILABLE, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
	{NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
	{INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
	{INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
	{INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
	{214, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"},
	{INVALID_PTX, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
	{INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
	{NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
	{700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
	{719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
	{801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
	{802, "CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized"},
	{SYSTEM_DRIVER_MISMATCH, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
	 "system has unsupported display driver / cuda driver combination"},
	{UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static int error_index(Result code)
{
	for (size_t i = 0; i < sizeof(errors) / sizeof(errors[0]); i++)
		if (errors[i].code == code)
			return i;
	return -1;
}

Result cuGetErrorName(Result code, const char **out)
{
	int i = error_index(code);

	*out = i < 0 ? NULL : errors[i].name;
	return i < 0 ? INVALID_VALUE : SUCCESS;
}

Result cuGetErrorString(Result code, const char **out)
{
	int i = error_index(code);

	*out = i < 0 ? NULL : errors[i].text;
	return i < 0 ? INVALID_VALUE : SUCCESS;
}

/* --- initialisation and devices ----------------------------------------------------------------------------------- */

static void add_device(int gpu, const char *uuid)
{
	if (devices < MAX_DEVICES) {
		seen[devices].gpu = gpu;
		snprintf(seen[devices].uuid, sizeof(seen[devices].uuid), "%s", uuid);
		devices++;
	}
}

/* Without a wish: every GPU that is not divided; only where all are, the first MIG device. */
static void add_all(int count)
{
	struct standin_mig migs[STANDIN_MAX_MIG];

	for (int gpu = 0; gpu < count; gpu++)
		if (!standin_number("lost", gpu, 0) && standin_number("mig", gpu, 0) <= 0)
			add_device(gpu, gpus[gpu].uuid);
	for (int gpu = 0; gpu < count && !devices; gpu++)
		if (!standin_number("lost", gpu, 0) && standin_mig_devices(gpu, migs))
			add_device(gpu, migs[0].uuid);
}

/* Add the device that a word of CUDA_VISIBLE_DEVICES names by UUID or its beginning; 0 where there is none. */
static int add_named(const char *word, int count)
{
	struct standin_mig migs[STANDIN_MAX_MIG];

	for (int gpu = 0; gpu < count; gpu++) {
		int number = standin_mig_devices(gpu, migs);

		if (standin_number("lost", gpu, 0))
			continue;
		if (!strncmp(gpus[gpu].uuid, word, strlen(word)) && standin_number("mig", gpu, 0) <= 0) {
			add_device(gpu, gpus[gpu].uuid);
			return 1;
		}
		for (int i = 0; i < number; i++)
			if (!strncmp(migs[i].uuid, word, strlen(word))) {
				add_device(gpu, migs[i].uuid);
				return 1;
			}
	}
	return 0;
}

/* CUDA_VISIBLE_DEVICES: indices or UUIDs (MIG-... too); the list ends at the first that is not there. */
static void choose_devices(void)
{
	const char *wanted = getenv("CUDA_VISIBLE_DEVICES");
	int count = standin_gpus(gpus), known;
	char list[512], *save = NULL, uuids[MAX_DEVICES][64];

	devices = 0;
	add_all(count);
	if (!wanted)
		return;
	known = devices;
	for (int i = 0; i < known; i++)
		strcpy(uuids[i], seen[i].uuid);
	devices = 0;
	snprintf(list, sizeof(list), "%s", wanted);
	for (char *word = strtok_r(list, ",", &save); word; word = strtok_r(NULL, ",", &save)) {
		if (isdigit((unsigned char)word[0]))
			word = atoi(word) < known ? uuids[atoi(word)] : "none";
		if (!add_named(word, count))
			break;
	}
}

Result cuInit(unsigned int flags)
{
	char version[80];
	long told;

	if (flags)
		return INVALID_VALUE;
	standin_autoload();
	TRY(fault("cuInit", -1));
	told = standin_number("cuda_init", -1, 0);
	if (told)
		return told;
	if (standin_loaded_version(version, sizeof(version)))
		return NO_DEVICE;
	if (strcmp(version, STANDIN_VERSION))
		return SYSTEM_DRIVER_MISMATCH;
	if (initialized)
		return SUCCESS;
	control = standin_open("nvidiactl");
	uvm = standin_open("nvidia-uvm");
	if (control < 0 || uvm < 0)
		return UNKNOWN; /* what a real cuInit says when nvidia-uvm is missing */
	choose_devices();
	if (!devices)
		return NO_DEVICE;
	initialized = 1;
	return SUCCESS;
}

/* CUDA 12.2, 12.4, 12.6 came with branches 535, 550, 560. */
Result cuDriverGetVersion(int *version)
{
	int branch = atoi(STANDIN_VERSION);

	*version = branch >= 560 ? 12060 : branch >= 550 ? 12040 : 12020;
	return SUCCESS;
}

Result cuDeviceGetCount(int *count)
{
	if (!initialized)
		return NOT_INITIALIZED;
	*count = devices;
	return fault("cuDeviceGetCount", -1);
}

Result cuDeviceGet(CUdevice *device, int ordinal)
{
	TRY(valid(ordinal));
	*device = ordinal;
	return fault("cuDeviceGet", ordinal);
}

Result cuDeviceGetName(char *out, int size, CUdevice device)
{
	TRY(valid(device));
	snprintf(out, size, "%s", gpus[seen[device].gpu].model);
	return SUCCESS;
}

static void uuid_bytes(const char *uuid, unsigned char out[16])
{
	int nibble = 0;

	memset(out, 0, 16);
	for (const char *digit = strchr(uuid, '-'); digit && *digit && nibble < 32; digit++) {
		char text[2] = {*digit, 0};

		if (!isxdigit((unsigned char)*digit))
			continue;
		out[nibble / 2] |= strtol(text, NULL, 16) << (nibble % 2 ? 0 : 4);
		nibble++;
	}
}

/* The first version tells a MIG device's GPU, the second the MIG device itself. */
Result cuDeviceGetUuid(unsigned char out[16], CUdevice device)
{
	TRY(valid(device));
	uuid_bytes(gpus[seen[device].gpu].uuid, out);
	return SUCCESS;
}

Result cuDeviceGetUuid_v2(unsigned char out[16], CUdevice device)
{
	TRY(valid(device));
	uuid_bytes(seen[device].uuid, out);
	return SUCCESS;
}

Result cuDeviceGetPCIBusId(char *out, int size, CUdevice device)
{
	TRY(valid(device));
	snprintf(out, size, "%s", gpus[seen[device].gpu].address);
	return SUCCESS;
}

Result cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
	TRY(valid(device));
	*bytes = (size_t)standin_number("mem_total_mib", seen[device].gpu, 81920) << 20;
	return SUCCESS;
}

Result cuDeviceTotalMem(size_t *bytes, CUdevice device)
{
	return cuDeviceTotalMem_v2(bytes, device);
}

Result cuDeviceGetAttribute(int *out, int attribute, CUdevice device)
{
	unsigned int bus = 0;

	TRY(valid(device));
	sscanf(gpus[seen[device].gpu].address, "%*x:%x", &bus);
	switch (attribute) {
	case 1: /* MAX_THREADS_PER_BLOCK */
		*out = 1024;
		break;
	case 10: /* WARP_SIZE */
		*out = 32;
		break;
	case 16: /* MULTIPROCESSOR_COUNT */
		*out = 108;
		break;
	case 20: /* COMPUTE_MODE */
		*out = standin_number("compute_mode", seen[device].gpu, COMPUTE_DEFAULT);
		break;
	case 33: /* PCI_BUS_ID */
		*out = bus;
		break;
	case 75: /* COMPUTE_CAPABILITY_MAJOR */
		*out = standin_number("capability_major", seen[device].gpu, 8);
		break;
	case 76: /* COMPUTE_CAPABILITY_MINOR */
		*out = standin_number("capability_minor", seen[device].gpu, 0);
		break;
	default:
		*out = 0;
	}
	return SUCCESS;
}

/* --- contexts ----------------------------------------------------------------------------------------------------- */

static Result open_device(struct context *context, CUdevice device)
{
	const struct standin_gpu *gpu = &gpus[seen[device].gpu];
	long mode = standin_number("compute_mode", seen[device].gpu, COMPUTE_DEFAULT);
	unsigned int pid;
	char node[32];

	if (mode == COMPUTE_PROHIBITED)
		return DEVICE_UNAVAILABLE;
	if (mode == COMPUTE_EXCLUSIVE_PROCESS && standin_holders(gpu->minor, &pid, 1))
		return DEVICE_UNAVAILABLE;
	snprintf(node, sizeof(node), "nvidia%d", gpu->minor);
	context->node = standin_open(node);
	context->device = device;
	return context->node < 0 ? NO_DEVICE : SUCCESS;
}

Result cuDevicePrimaryCtxRetain(struct context **out, CUdevice device)
{
	TRY(valid(device));
	TRY(fault("cuDevicePrimaryCtxRetain", device));
	if (!primary[device].users)
		TRY(open_device(&primary[device], device));
	primary[device].users++;
	*out = &primary[device];
	return SUCCESS;
}

Result cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
	TRY(valid(device));
	if (!primary[device].users)
		return INVALID_CONTEXT;
	if (!--primary[device].users) {
		close(primary[device].node);
		if (current == &primary[device])
			current = NULL;
	}
	return SUCCESS;
}

Result cuDevicePrimaryCtxRelease(CUdevice device)
{
	return cuDevicePrimaryCtxRelease_v2(device);
}

Result cuCtxCreate_v2(struct context **out, unsigned int flags, CUdevice device)
{
	struct context *context;
	Result result;

	(void)flags;
	TRY(valid(device));
	TRY(fault("cuCtxCreate", device));
	context = calloc(1, sizeof(*context));
	if (!context)
		return OUT_OF_MEMORY;
	result = open_device(context, device);
	if (result) {
		free(context);
		return result;
	}
	*out = current = context;
	return SUCCESS;
}

Result cuCtxDestroy_v2(struct context *context)
{
	if (!context)
		return INVALID_CONTEXT;
	close(context->node);
	if (current == context)
		current = NULL;
	free(context);
	return SUCCESS;
}

Result cuCtxSetCurrent(struct context *context)
{
	if (!initialized)
		return NOT_INITIALIZED;
	current = context;
	return SUCCESS;
}

Result cuCtxGetCurrent(struct context **out)
{
	*out = current;
	return initialized ? SUCCESS : NOT_INITIALIZED;
}

Result cuCtxPushCurrent_v2(struct context *context)
{
	return cuCtxSetCurrent(context);
}

Result cuCtxPopCurrent_v2(struct context **out)
{
	if (out)
		*out = current;
	current = NULL;
	return SUCCESS;
}

Result cuCtxGetDevice(CUdevice *device)
{
	TRY(entered("cuCtxGetDevice"));
	*device = current->device;
	return SUCCESS;
}

Result cuCtxSynchronize(void)
{
	return entered("cuCtxSynchronize");
}

/* --- memory: host memory under device pointers, so that a stray pointer is caught --------------------------------- */

Result cuMemAlloc_v2(DevicePointer *out, size_t size)
{
	struct allocation *made;

	TRY(entered("cuMemAlloc"));
	if (!size)
		return INVALID_VALUE;
	made = malloc(sizeof(*made));
	if (!made)
		return OUT_OF_MEMORY;
	made->bytes = calloc(1, size);
	if (!made->bytes) {
		free(made);
		return OUT_OF_MEMORY;
	}
	made->size = size;
	made->device = current->device;
	made->next = allocations;
	allocations = made;
	*out = (DevicePointer)(uintptr_t)made->bytes;
	return SUCCESS;
}

Result cuMemFree_v2(DevicePointer pointer)
{
	TRY(entered("cuMemFree"));
	for (struct allocation **link = &allocations; *link; link = &(*link)->next) {
		struct allocation *gone = *link;

		if (gone->bytes == (unsigned char *)(uintptr_t)pointer) {
			*link = gone->next;
			free(gone->bytes);
			free(gone);
			return SUCCESS;
		}
	}
	return INVALID_VALUE;
}

static unsigned char *device_bytes(DevicePointer pointer, size_t size)
{
	unsigned char *wanted = (unsigned char *)(uintptr_t)pointer;

	for (struct allocation *known = allocations; known; known = known->next)
		if (known->device == current->device && wanted >= known->bytes &&
		    wanted + size <= known->bytes + known->size)
			return wanted;
	return NULL;
}

Result cuMemcpyHtoD_v2(DevicePointer to, const void *from, size_t size)
{
	unsigned char *bytes;

	TRY(entered("cuMemcpyHtoD"));
	bytes = device_bytes(to, size);
	if (!bytes)
		return INVALID_VALUE;
	memcpy(bytes, from, size);
	return SUCCESS;
}

Result cuMemcpyDtoH_v2(void *to, DevicePointer from, size_t size)
{
	unsigned char *bytes;

	TRY(entered("cuMemcpyDtoH"));
	bytes = device_bytes(from, size);
	if (!bytes)
		return INVALID_VALUE;
	memcpy(to, bytes, size);
	return SUCCESS;
}

Result cuMemsetD8_v2(DevicePointer to, unsigned char value, size_t size)
{
	unsigned char *bytes;

	TRY(entered("cuMemsetD8"));
	bytes = device_bytes(to, size);
	if (!bytes)
		return INVALID_VALUE;
	memset(bytes, value, size);
	return SUCCESS;
}

Result cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
	TRY(entered("cuMemGetInfo"));
	TRY(cuDeviceTotalMem_v2(total, current->device));
	*free_bytes = *total;
	for (struct allocation *known = allocations; known; known = known->next)
		if (known->device == current->device)
			*free_bytes -= known->size;
	return SUCCESS;
}

/* --- modules and the one kernel ----------------------------------------------------------------------------------- */

static const char axpy[] = "gpufleet_axpy";

Result cuModuleLoadData(struct function **module, const void *image)
{
	const char *entry;

	TRY(entered("cuModuleLoadData"));
	if (!strstr(image, ".version"))
		return INVALID_IMAGE;
	entry = strstr(image, ".entry");
	if (!entry)
		return INVALID_PTX;
	entry += strlen(".entry");
	entry += strspn(entry, " \t\n");
	*module = calloc(1, sizeof(**module));
	if (!*module)
		return OUT_OF_MEMORY;
	snprintf((*module)->name, sizeof((*module)->name), "%.*s", (int)strcspn(entry, " \t\n("), entry);
	return SUCCESS;
}

Result cuModuleLoadDataEx(struct function **module, const void *image, unsigned int count, int *options, void **values)
{
	(void)count, (void)options, (void)values;
	return cuModuleLoadData(module, image);
}

Result cuModuleUnload(struct function *module)
{
	free(module);
	return SUCCESS;
}

Result cuModuleGetFunction(struct function **out, struct function *module, const char *name)
{
	TRY(entered("cuModuleGetFunction"));
	if (!module)
		return INVALID_HANDLE;
	if (strcmp(module->name, name))
		return NOT_FOUND;
	*out = module;
	return SUCCESS;
}

Result cuLaunchKernel(struct function *function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
		      unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared, void *stream,
		      void **parameters, void **extra)
{
	uint32_t a, n, *x, *y;
	uint64_t threads = (uint64_t)grid_x * grid_y * grid_z * block_x * block_y * block_z;

	(void)shared, (void)stream, (void)extra;
	TRY(entered("cuLaunchKernel"));
	if (!function || strcmp(function->name, axpy))
		return INVALID_HANDLE;
	if (!parameters || !threads || block_x * block_y * block_z > 1024)
		return INVALID_VALUE;
	a = *(uint32_t *)parameters[2];
	n = *(uint32_t *)parameters[3];
	if (n > threads)
		n = threads; /* one element a thread, as the PTX says */
	x = (uint32_t *)device_bytes(*(DevicePointer *)parameters[0], (size_t)n * sizeof(*x));
	y = (uint32_t *)device_bytes(*(DevicePointer *)parameters[1], (size_t)n * sizeof(*y));
	if (!x || !y)
		return 700;
	for (uint32_t i = 0; i < n; i++)
		y[i] = a * x[i] + y[i];
	if (n && standin_number("cuda_wrong", seen[current->device].gpu, 0))
		y[n / 2] ^= 1u << 17;
	return SUCCESS;
}

/* --- events: everything above is synchronous, so an event has always happened ------------------------------------- */

Result cuEventCreate(int **event, unsigned int flags)
{
	(void)flags;
	TRY(entered("cuEventCreate"));
	*event = calloc(1, sizeof(**event));
	return *event ? SUCCESS : OUT_OF_MEMORY;
}

Result cuEventRecord(int *event, void *stream)
{
	(void)event, (void)stream;
	return entered("cuEventRecord");
}

Result cuEventQuery(int *event)
{
	(void)event;
	return entered("cuEventQuery");
}

Result cuEventSynchronize(int *event)
{
	(void)event;
	return entered("cuEventSynchronize");
}

Result cuEventDestroy_v2(int *event)
{
	free(event);
	return SUCCESS;
}
