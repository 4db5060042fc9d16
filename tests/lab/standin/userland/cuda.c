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
 *
 * The checkpoint calls (in the real driver from 570 on) act on another process: a thread of that process named
 * "cuda-checkpoint" does what is asked. Locked: its calls wait. Checkpointed: device memory is copied to the host and
 * its pages are given back, every device file is closed. Their knobs take a PID in place of a GPU:
 *   cuda_busy=1                 submitted work never ends, so a lock runs into its time limit
 *   cuda_fatal.<function>=CODE  the call fails and leaves the process in state "failed"
 *   cuda_lie.<function>=1       the call says 0, but: cuCheckpointProcessRestore brings back wrong contents,
 *                               cuCheckpointProcessGetState says "running", the others do nothing
 */
#define _GNU_SOURCE
#include "standin.h"

#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <time.h>
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
	OPERATING_SYSTEM = 304,
	INVALID_HANDLE = 400,
	ILLEGAL_STATE = 401,
	NOT_FOUND = 500,
	NOT_READY = 600,
	NOT_SUPPORTED = 801,
	SYSTEM_DRIVER_MISMATCH = 803,
	UNKNOWN = 999,
};
enum { COMPUTE_DEFAULT, COMPUTE_EXCLUSIVE_THREAD, COMPUTE_PROHIBITED, COMPUTE_EXCLUSIVE_PROCESS };

struct context {
	struct context *next;
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
	unsigned char *staged; /* on the host, while checkpointed */
};

static int initialized, control = -1, uvm = -1;
static struct standin_gpu gpus[STANDIN_MAX_GPUS];
static int gpu_count; /* that the kernel shows, whatever CUDA_VISIBLE_DEVICES says */
#define MAX_DEVICES 16
static struct {
	int gpu;       /* of the module */
	char uuid[64]; /* of the GPU or of the MIG device */
} seen[MAX_DEVICES]; /* by CUDA device */
static int devices;
static struct context primary[MAX_DEVICES], *contexts;
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

/* --- the gate: calls wait while the process is locked or checkpointed ---------------------------------------------- */

enum state { RUNNING, LOCKED, CHECKPOINTED, FAILED };

static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t gate_moved = PTHREAD_COND_INITIALIZER;
static enum state state;
static int inside;
static __thread int depth;

static int gate_enter(void)
{
	if (!depth++) {
		pthread_mutex_lock(&gate);
		while (state != RUNNING)
			pthread_cond_wait(&gate_moved, &gate);
		inside++;
		pthread_mutex_unlock(&gate);
	}
	return 0;
}

static void gate_leave(int *entered)
{
	(void)entered;
	if (!--depth) {
		pthread_mutex_lock(&gate);
		inside--;
		pthread_cond_broadcast(&gate_moved);
		pthread_mutex_unlock(&gate);
	}
}

#define GATE __attribute__((cleanup(gate_leave), unused)) int entered_gate = gate_enter()

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
	{OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"},
	{INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
	{ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
	{NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
	{NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
	{700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
	{719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
	{NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
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

	gpu_count = count;
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

static void start_agent(void);

Result cuInit(unsigned int flags)
{
	GATE;
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
	start_agent();
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
	GATE;
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
	GATE;
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
	GATE;
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
	context->next = contexts;
	contexts = context;
	*out = current = context;
	return SUCCESS;
}

Result cuCtxDestroy_v2(struct context *context)
{
	GATE;
	if (!context)
		return INVALID_CONTEXT;
	for (struct context **link = &contexts; *link; link = &(*link)->next)
		if (*link == context) {
			*link = context->next;
			break;
		}
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
	GATE;
	return entered("cuCtxSynchronize");
}

/* --- memory: pages of its own under device pointers, so that a stray pointer is caught ---------------------------- */

static size_t pages(size_t size)
{
	return (size + 4095) & ~(size_t)4095;
}

Result cuMemAlloc_v2(DevicePointer *out, size_t size)
{
	GATE;
	struct allocation *made;

	TRY(entered("cuMemAlloc"));
	if (!size)
		return INVALID_VALUE;
	made = calloc(1, sizeof(*made));
	if (!made)
		return OUT_OF_MEMORY;
	made->bytes = mmap(NULL, pages(size), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (made->bytes == MAP_FAILED) {
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
	GATE;
	TRY(entered("cuMemFree"));
	for (struct allocation **link = &allocations; *link; link = &(*link)->next) {
		struct allocation *gone = *link;

		if (gone->bytes == (unsigned char *)(uintptr_t)pointer) {
			*link = gone->next;
			munmap(gone->bytes, pages(gone->size));
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
	GATE;
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
	GATE;
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
	GATE;
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
	GATE;
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
	GATE;
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

/* --- checkpoint: the side of the process that is checkpointed ------------------------------------------------------ */

#define FOLDER "/run/nvidia-standin/checkpoint"
static const char agent_name[] = "cuda-checkpoint"; /* 15 characters, as much as the kernel keeps */

static int agent_signal(void)
{
	return SIGRTMIN + 7;
}

static void place(char out[512], int pid, const char *what)
{
	const char *root = getenv("NVIDIA_STANDIN_ROOT");

	snprintf(out, 512, "%s" FOLDER "/%d.%s", root ? root : "", pid, what);
}

/* The same place, seen from outside: the process may have a root and PIDs of its own, as in a container. */
static void place_of(char out[512], int pid, const char *what)
{
	char name[64], line[256], inner[512];
	int own = pid;
	FILE *file;

	snprintf(name, sizeof(name), "/proc/%d/status", pid);
	file = fopen(name, "re");
	while (file && fgets(line, sizeof(line), file))
		if (!strncmp(line, "NSpid:", 6))
			own = atoi(strrchr(line, '\t') + 1);
	if (file)
		fclose(file);
	place(inner, own, what);
	snprintf(out, 512, "/proc/%d/root%.440s", pid, inner);
}

static long knob(const char *kind, const char *function, int pid)
{
	char key[128];

	snprintf(key, sizeof(key), "cuda_%s.%s", kind, function);
	return standin_number(key, pid, 0);
}

static Result do_lock(long timeout_ms)
{
	struct timespec end;
	int late = 0;

	if (state != RUNNING)
		return ILLEGAL_STATE;
	clock_gettime(CLOCK_REALTIME, &end);
	end.tv_sec += timeout_ms / 1000;
	end.tv_nsec += timeout_ms % 1000 * 1000000;
	if (end.tv_nsec >= 1000000000) {
		end.tv_sec++;
		end.tv_nsec -= 1000000000;
	}
	state = LOCKED;
	while (!late && (inside || standin_number("cuda_busy", getpid(), 0)))
		if (timeout_ms)
			late = pthread_cond_timedwait(&gate_moved, &gate, &end);
		else
			pthread_cond_wait(&gate_moved, &gate);
	if (!late)
		return SUCCESS;
	state = RUNNING;
	pthread_cond_broadcast(&gate_moved);
	return NOT_READY;
}

static void close_node(int *descriptor)
{
	if (*descriptor >= 0)
		close(*descriptor);
	*descriptor = -1;
}

static Result do_checkpoint(void)
{
	if (state != LOCKED)
		return ILLEGAL_STATE;
	for (struct allocation *one = allocations; one; one = one->next) {
		one->staged = malloc(one->size);
		if (!one->staged) {
			state = FAILED;
			return OUT_OF_MEMORY;
		}
		memcpy(one->staged, one->bytes, one->size);
		madvise(one->bytes, pages(one->size), MADV_DONTNEED);
		mprotect(one->bytes, pages(one->size), PROT_NONE);
	}
	for (struct context *one = contexts; one; one = one->next)
		close_node(&one->node);
	for (int device = 0; device < devices; device++)
		if (primary[device].users)
			close_node(&primary[device].node);
	close_node(&uvm);
	close_node(&control);
	state = CHECKPOINTED;
	return SUCCESS;
}

static int reopen(struct context *one)
{
	char node[32];

	snprintf(node, sizeof(node), "nvidia%d", gpus[seen[one->device].gpu].minor);
	one->node = standin_open(node);
	return one->node < 0;
}

/* Which GPU of this machine each GPU that the process knew is now: by the pairs given, or by itself. Every GPU the
 * kernel showed must be among the pairs, as the real call wants. */
static Result follow_map(const char *pairs)
{
	struct standin_gpu now[STANDIN_MAX_GPUS], found[STANDIN_MAX_GPUS];
	int count = standin_gpus(now);

	for (int gpu = 0; gpu < gpu_count; gpu++) {
		char wanted[64], hex[40], *pair;
		int match = -1;

		snprintf(wanted, sizeof(wanted), "%s", gpus[gpu].uuid);
		if (*pairs) {
			pair = strstr(pairs, wanted);
			if (!pair || sscanf(pair + strlen(wanted), "=GPU-%36[0-9a-f-]", hex) != 1)
				return INVALID_VALUE;
			snprintf(wanted, sizeof(wanted), "GPU-%s", hex);
		}
		for (int other = 0; other < count; other++)
			if (!strcmp(now[other].uuid, wanted))
				match = other;
		if (match < 0)
			return INVALID_VALUE;
		found[gpu] = now[match];
	}
	for (int device = 0; device < devices; device++)
		if (!strcmp(seen[device].uuid, gpus[seen[device].gpu].uuid))
			strcpy(seen[device].uuid, found[seen[device].gpu].uuid);
	memcpy(gpus, found, sizeof(gpus));
	return SUCCESS;
}

static Result do_restore(const char *pairs)
{
	char version[80];
	int bad;

	if (state != CHECKPOINTED)
		return ILLEGAL_STATE;
	if (standin_loaded_version(version, sizeof(version)) || strcmp(version, STANDIN_VERSION)) {
		state = FAILED;
		return OPERATING_SYSTEM;
	}
	TRY(follow_map(pairs));
	control = standin_open("nvidiactl");
	uvm = standin_open("nvidia-uvm");
	bad = control < 0 || uvm < 0;
	for (struct context *one = contexts; one; one = one->next)
		bad |= reopen(one);
	for (int device = 0; device < devices; device++)
		if (primary[device].users)
			bad |= reopen(&primary[device]);
	if (bad) {
		state = FAILED;
		return OPERATING_SYSTEM;
	}
	for (struct allocation *one = allocations; one; one = one->next) {
		mprotect(one->bytes, pages(one->size), PROT_READ | PROT_WRITE);
		memcpy(one->bytes, one->staged, one->size);
		if (knob("lie", "cuCheckpointProcessRestore", getpid()))
			memset(one->bytes, 0, one->size);
		free(one->staged);
		one->staged = NULL;
	}
	state = LOCKED;
	return SUCCESS;
}

static Result do_unlock(void)
{
	if (state != LOCKED)
		return ILLEGAL_STATE;
	state = RUNNING;
	pthread_cond_broadcast(&gate_moved);
	return SUCCESS;
}

static Result act(const char *function, const char *argument)
{
	long fatal = knob("fatal", function, getpid());
	int lie = knob("lie", function, getpid());

	if (!strcmp(function, "cuCheckpointProcessGetState"))
		return SUCCESS;
	if (state == FAILED)
		return OPERATING_SYSTEM;
	if (fatal) {
		state = FAILED;
		return fatal;
	}
	if (!strcmp(function, "cuCheckpointProcessRestore"))
		return do_restore(argument);
	if (lie)
		return SUCCESS;
	if (!strcmp(function, "cuCheckpointProcessLock"))
		return do_lock(atol(argument));
	if (!strcmp(function, "cuCheckpointProcessCheckpoint"))
		return do_checkpoint();
	return do_unlock();
}

/* Answers each request: <pid>.ask holds "token function argument", <pid>.said gets "token code state". */
static void *agent(void *unused)
{
	sigset_t wanted;

	prctl(PR_SET_NAME, agent_name);
	sigemptyset(&wanted);
	sigaddset(&wanted, agent_signal());
	for (;;) {
		char name[512], part[520], function[64], argument[2048] = "";
		unsigned long token;
		Result code;
		FILE *file;

		if (sigwaitinfo(&wanted, NULL) < 0)
			continue;
		place(name, getpid(), "ask");
		file = fopen(name, "re");
		if (!file)
			continue;
		if (fscanf(file, "%lu %63s %2047s", &token, function, argument) < 2) {
			fclose(file);
			continue;
		}
		fclose(file);
		pthread_mutex_lock(&gate);
		code = act(function, argument);
		place(name, getpid(), "said");
		snprintf(part, sizeof(part), "%s.part", name);
		file = fopen(part, "we");
		if (file) {
			fprintf(file, "%lu %d %d\n", token, code, state);
			fclose(file);
			rename(part, name);
		}
		pthread_mutex_unlock(&gate);
	}
	return unused;
}

static void start_agent(void)
{
	pthread_t thread;
	sigset_t all, before;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	if (!pthread_create(&thread, NULL, agent, NULL))
		pthread_detach(thread);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* --- checkpoint: the side that asks ------------------------------------------------------------------------------- */

static int agent_of(int pid)
{
	char name[300], comm[32];
	struct dirent *entry;
	DIR *list;
	int found = 0;

	snprintf(name, sizeof(name), "/proc/%d/task", pid);
	list = opendir(name);
	while (list && !found && (entry = readdir(list))) {
		FILE *file;

		snprintf(name, sizeof(name), "/proc/%d/task/%.20s/comm", pid, entry->d_name);
		file = fopen(name, "re");
		if (file && fgets(comm, sizeof(comm), file) && !strncmp(comm, agent_name, strlen(agent_name)))
			found = atoi(entry->d_name);
		if (file)
			fclose(file);
	}
	if (list)
		closedir(list);
	return found;
}

static Result exchange(int pid, int tid, const char *function, const char *argument, int *state_out)
{
	static unsigned long count;
	unsigned long token = (unsigned long)time(NULL) * 1000000 + getpid() % 1000 * 1000 + ++count, answered = 0;
	char name[512], part[520], answer[512];
	int code = 0, now = 0, folder, alive = 1;
	FILE *file;

	place_of(name, pid, "ask");
	snprintf(part, sizeof(part), "%s.part", name);
	file = fopen(part, "we");
	if (!file)
		return OPERATING_SYSTEM;
	fprintf(file, "%lu %s %s\n", token, function, argument);
	fclose(file);
	place_of(answer, pid, "said");
	*strrchr(name, '/') = 0;
	folder = open(name, O_PATH | O_DIRECTORY | O_CLOEXEC); /* the process may end right after its answer */
	place_of(name, pid, "ask");
	if (folder < 0 || rename(part, name) || syscall(SYS_tgkill, pid, tid, agent_signal()))
		return OPERATING_SYSTEM;
	while (answered != token && alive) {
		struct timespec nap = {.tv_nsec = 2000000};
		int said;

		nanosleep(&nap, NULL);
		alive = agent_of(pid) == tid;
		said = openat(folder, strrchr(answer, '/') + 1, O_RDONLY | O_CLOEXEC);
		file = said < 0 ? NULL : fdopen(said, "r");
		if (!file)
			continue;
		if (fscanf(file, "%lu %d %d", &answered, &code, &now) != 3)
			answered = 0;
		fclose(file);
	}
	close(folder);
	if (answered != token)
		return OPERATING_SYSTEM; /* it ended meanwhile */
	if (state_out)
		*state_out = now;
	return code;
}

static Result ask(int pid, const char *function, const char *argument, int *state_out)
{
	char lock[512];
	int tid = agent_of(pid), descriptor;
	Result code;

	if (!tid)
		return NOT_INITIALIZED; /* what the real driver says of a process that has no CUDA */
	TRY(standin_fault("cuda", function, pid));
	place_of(lock, pid, "lock");
	*strrchr(lock, '/') = 0;
	*strrchr(lock, '/') = 0;
	mkdir(lock, 0755);
	place_of(lock, pid, "lock");
	*strrchr(lock, '/') = 0;
	mkdir(lock, 0700);
	place_of(lock, pid, "lock");
	descriptor = open(lock, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	if (descriptor < 0 || flock(descriptor, LOCK_EX))
		return OPERATING_SYSTEM;
	code = exchange(pid, tid, function, argument, state_out);
	close(descriptor);
	return code;
}

Result cuCheckpointProcessGetState(int pid, int *out)
{
	int now = RUNNING;

	TRY(ask(pid, "cuCheckpointProcessGetState", "", &now));
	*out = knob("lie", "cuCheckpointProcessGetState", pid) ? RUNNING : now;
	return SUCCESS;
}

Result cuCheckpointProcessGetRestoreThreadId(int pid, int *tid)
{
	*tid = agent_of(pid);
	if (!*tid)
		return NOT_INITIALIZED;
	return standin_fault("cuda", "cuCheckpointProcessGetRestoreThreadId", pid);
}

struct lock_args {
	unsigned int timeout_ms, reserved0;
	uint64_t reserved1[7];
};

Result cuCheckpointProcessLock(int pid, struct lock_args *args)
{
	char timeout[16];

	snprintf(timeout, sizeof(timeout), "%u", args ? args->timeout_ms : 0);
	return ask(pid, "cuCheckpointProcessLock", timeout, NULL);
}

Result cuCheckpointProcessCheckpoint(int pid, void *args)
{
	(void)args;
	return ask(pid, "cuCheckpointProcessCheckpoint", "", NULL);
}

struct gpu_pair {
	unsigned char old[16], new[16];
};

struct restore_args {
	struct gpu_pair *pairs;
	unsigned int count;
	char reserved[64 - sizeof(void *) - sizeof(unsigned int)];
};

static void uuid_text(char out[48], const unsigned char bytes[16])
{
	int length = snprintf(out, 48, "GPU-");

	for (int i = 0; i < 16; i++)
		length += snprintf(out + length, 48 - length, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", bytes[i]);
}

Result cuCheckpointProcessRestore(int pid, struct restore_args *args)
{
	char pairs[2048] = "", old[48], new[48];
	int length = 0;

	if (!initialized && standin_number("persistence", 0, 0) <= 0)
		return NOT_INITIALIZED; /* persistence mode, or an initialised caller, keeps the GPUs up */
	for (unsigned int i = 0; args && i < args->count && i < STANDIN_MAX_GPUS; i++) {
		uuid_text(old, args->pairs[i].old);
		uuid_text(new, args->pairs[i].new);
		length += snprintf(pairs + length, sizeof(pairs) - length, "%s=%s,", old, new);
	}
	return ask(pid, "cuCheckpointProcessRestore", pairs, NULL);
}

Result cuCheckpointProcessUnlock(int pid, void *args)
{
	(void)args;
	return ask(pid, "cuCheckpointProcessUnlock", "", NULL);
}
