/* SPDX-License-Identifier: GPL-3.0-or-later */
/*
 * Stand-in for libnvidia-ml.so.1: the C names and structures of NVML, answered from the loaded stand-in module and from
 * the lab's state (standin.h). Names that end in _v2, _v3 share the knobs of the plain name.
 *
 * Knobs (append ".<gpu>" for one GPU; all optional):
 *   nvml_error.<function>=CODE  nvml_hang.<function>=1   lost=1 (the GPU fell off the bus)
 *   serial= mem_total_mib= mem_used_mib= proc_used_mib= temperature= power_limit_mw= gsp=1
 *   ecc=-1 (not supported), ecc_corrected= ecc_uncorrected= ecc_uncorrected_aggregate=
 *   remapped_correctable= remapped_uncorrectable= remap_pending= remap_failure=
 *   mig=-1 (not supported) mig_persists=0 (Hopper: mode lost on reload)
 *   fabric_state= (0 not supported, 1 not started, 2 in progress, 3 completed) fabric_status= fabric_clique=
 *   pcie_gen= pcie_gen_max= pcie_width= pcie_width_max= nvlinks= nvlink_down=<link>
 */
#include "standin.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int Return;
enum {
	OK = 0,
	UNINITIALIZED = 1,
	INVALID_ARGUMENT = 2,
	NOT_SUPPORTED = 3,
	NO_PERMISSION = 4,
	NOT_FOUND = 6,
	INSUFFICIENT_SIZE = 7,
	DRIVER_NOT_LOADED = 9,
	GPU_IS_LOST = 15,
	LIB_RM_VERSION_MISMATCH = 18,
	IN_USE = 19,
	INSUFFICIENT_RESOURCES = 23,
	UNKNOWN = 999,
};

#define MAX_GI 8
#define MAX_CI 8

/* gi and ci are -1 for a whole GPU. The same structure serves as handle of a GPU, a MIG device, a GPU instance and a
 * compute instance: handles are opaque to callers. */
typedef struct handle {
	int gpu, gi, ci;
} Handle, *Device, *GpuInstance, *ComputeInstance;

static Handle whole[STANDIN_MAX_GPUS];
static Handle parts[STANDIN_MAX_GPUS][MAX_GI + 1][MAX_CI + 1]; /* [gi][MAX_CI] is the GPU instance itself */
static int users, control = -1;

static Device part(int gpu, int gi, int ci)
{
	Handle *handle = &parts[gpu][gi][ci < 0 ? MAX_CI : ci];

	*handle = (Handle){gpu, gi, ci};
	return handle;
}

static Return fault(const char *function, int gpu)
{
	char name[96];
	size_t length;

	snprintf(name, sizeof(name), "%s", function);
	length = strlen(name);
	if (length > 3 && name[length - 3] == '_' && name[length - 2] == 'v')
		name[length - 3] = 0;
	return standin_fault("nvml", name, gpu);
}

static Return enter(const char *function, Device device)
{
	struct standin_gpu gpus[STANDIN_MAX_GPUS];
	Return injected;

	if (!users)
		return UNINITIALIZED;
	if (!device || device->gpu >= standin_gpus(gpus))
		return INVALID_ARGUMENT;
	injected = fault(function, device->gpu);
	if (injected)
		return injected;
	return standin_number("lost", device->gpu, 0) ? GPU_IS_LOST : OK;
}

#define ENTER(device)                                                                                                  \
	do {                                                                                                           \
		Return entered = enter(__func__, device);                                                              \
		if (entered)                                                                                           \
			return entered;                                                                                \
	} while (0)
#define ENTER_AS_ROOT(device)                                                                                          \
	do {                                                                                                           \
		ENTER(device);                                                                                         \
		if (geteuid())                                                                                         \
			return NO_PERMISSION;                                                                          \
	} while (0)

static struct standin_gpu described(Device device)
{
	struct standin_gpu gpus[STANDIN_MAX_GPUS];

	memset(gpus, 0, sizeof(gpus));
	standin_gpus(gpus);
	return gpus[device->gpu];
}

static Return give(const char *text, char *out, unsigned int size)
{
	if (strlen(text) + 1 > size)
		return INSUFFICIENT_SIZE;
	strcpy(out, text);
	return OK;
}

static long number(const char *key, Device device, long otherwise)
{
	return standin_number(key, device->gpu, otherwise);
}

static Return keep(enum standin_layer layer, const char *key, Device device, long value)
{
	return standin_keep_number(layer, key, device->gpu, value) ? UNKNOWN : OK;
}

/* --- library and system ------------------------------------------------------------------------------------------- */

Return nvmlInitWithFlags(unsigned int flags)
{
	char version[80];
	Return injected;

	(void)flags;
	standin_autoload();
	injected = fault("nvmlInit", -1);
	if (injected)
		return injected;
	if (standin_loaded_version(version, sizeof(version)))
		return DRIVER_NOT_LOADED;
	if (strcmp(version, STANDIN_VERSION))
		return LIB_RM_VERSION_MISMATCH;
	if (!users)
		control = standin_open("nvidiactl");
	if (control < 0)
		return geteuid() ? NO_PERMISSION : UNKNOWN;
	for (int gpu = 0; gpu < STANDIN_MAX_GPUS; gpu++)
		whole[gpu] = (Handle){gpu, -1, -1};
	users++;
	return OK;
}

Return nvmlInit_v2(void)
{
	return nvmlInitWithFlags(0);
}

Return nvmlInit(void)
{
	return nvmlInitWithFlags(0);
}

Return nvmlShutdown(void)
{
	if (!users)
		return UNINITIALIZED;
	if (!--users) {
		close(control);
		control = -1;
	}
	return OK;
}

const char *nvmlErrorString(Return code)
{
	static const struct {
		Return code;
		const char *text;
	} texts[] = {
		{OK, "Success"},
		{UNINITIALIZED, "Uninitialized"},
		{INVALID_ARGUMENT, "Invalid Argument"},
		{NOT_SUPPORTED, "Not Supported"},
		{NO_PERMISSION, "Insufficient Permissions"},
		{NOT_FOUND, "Not Found"},
		{INSUFFICIENT_SIZE, "Insufficient Size"},
		{DRIVER_NOT_LOADED, "Driver Not Loaded"},
		{10, "Timeout"},
		{GPU_IS_LOST, "GPU is lost"},
		{16, "GPU requires reset"},
		{LIB_RM_VERSION_MISMATCH, "Driver/library version mismatch"},
		{IN_USE, "In use by another client"},
		{INSUFFICIENT_RESOURCES, "Insufficient Resources"},
	};

	for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++)
		if (texts[i].code == code)
			return texts[i].text;
	return "Unknown Error";
}

Return nvmlSystemGetDriverVersion(char *out, unsigned int size)
{
	char version[80];

	if (!users)
		return UNINITIALIZED;
	return standin_loaded_version(version, sizeof(version)) ? DRIVER_NOT_LOADED : give(version, out, size);
}

Return nvmlSystemGetNVMLVersion(char *out, unsigned int size)
{
	return give("12." STANDIN_VERSION, out, size);
}

/* CUDA 12.2, 12.4, 12.6 came with branches 535, 550, 560. */
Return nvmlSystemGetCudaDriverVersion_v2(int *version)
{
	int branch = atoi(STANDIN_VERSION);

	*version = branch >= 560 ? 12060 : branch >= 550 ? 12040 : 12020;
	return OK;
}

Return nvmlSystemGetCudaDriverVersion(int *version)
{
	return nvmlSystemGetCudaDriverVersion_v2(version);
}

Return nvmlSystemGetProcessName(unsigned int pid, char *out, unsigned int size)
{
	char name[64], text[512] = "";
	FILE *file;

	snprintf(name, sizeof(name), "/proc/%u/cmdline", pid);
	file = fopen(name, "re");
	if (!file)
		return NOT_FOUND;
	if (!fgets(text, sizeof(text), file))
		text[0] = 0;
	fclose(file);
	snprintf(out, size, "%s", text);
	return OK;
}

/* --- devices ------------------------------------------------------------------------------------------------------ */

Return nvmlDeviceGetCount_v2(unsigned int *count)
{
	struct standin_gpu gpus[STANDIN_MAX_GPUS];

	if (!users)
		return UNINITIALIZED;
	*count = standin_gpus(gpus);
	return fault(__func__, -1);
}

Return nvmlDeviceGetCount(unsigned int *count)
{
	return nvmlDeviceGetCount_v2(count);
}

Return nvmlDeviceGetHandleByIndex_v2(unsigned int index, Device *device)
{
	if (index >= STANDIN_MAX_GPUS)
		return INVALID_ARGUMENT;
	ENTER(&whole[index]);
	*device = &whole[index];
	return OK;
}

Return nvmlDeviceGetHandleByIndex(unsigned int index, Device *device)
{
	return nvmlDeviceGetHandleByIndex_v2(index, device);
}

Return nvmlDeviceGetHandleByPciBusId_v2(const char *address, Device *device)
{
	struct standin_gpu gpus[STANDIN_MAX_GPUS];
	unsigned int domain, bus, slot, other_domain, other_bus, other_slot;
	int count = standin_gpus(gpus);

	if (!users)
		return UNINITIALIZED;
	if (sscanf(address, "%x:%x:%x", &domain, &bus, &slot) != 3)
		return INVALID_ARGUMENT;
	for (int gpu = 0; gpu < count; gpu++)
		if (sscanf(gpus[gpu].address, "%x:%x:%x", &other_domain, &other_bus, &other_slot) == 3 &&
		    domain == other_domain && bus == other_bus && slot == other_slot)
			return nvmlDeviceGetHandleByIndex_v2(gpu, device);
	return NOT_FOUND;
}

Return nvmlDeviceGetIndex(Device device, unsigned int *index)
{
	ENTER(device);
	*index = device->gpu;
	return OK;
}

Return nvmlDeviceGetMinorNumber(Device device, unsigned int *minor)
{
	ENTER(device);
	*minor = described(device).minor;
	return OK;
}

Return nvmlDeviceGetUUID(Device device, char *out, unsigned int size)
{
	char text[64];

	ENTER(device);
	if (device->ci < 0)
		return give(described(device).uuid, out, size);
	standin_mig_uuid(device->gpu, device->gi, device->ci, text);
	return give(text, out, size);
}

Return nvmlDeviceGetHandleByUUID(const char *uuid, Device *device)
{
	struct standin_gpu gpus[STANDIN_MAX_GPUS];
	int count = standin_gpus(gpus);

	if (!users)
		return UNINITIALIZED;
	for (int gpu = 0; gpu < count; gpu++)
		if (!strcmp(gpus[gpu].uuid, uuid))
			return nvmlDeviceGetHandleByIndex_v2(gpu, device);
	for (int gpu = 0; gpu < count; gpu++) {
		struct standin_mig migs[STANDIN_MAX_MIG];
		int number = standin_mig_devices(gpu, migs);

		for (int i = 0; i < number; i++)
			if (!strcmp(migs[i].uuid, uuid)) {
				*device = part(gpu, migs[i].gi, migs[i].ci);
				return OK;
			}
	}
	return NOT_FOUND;
}

Return nvmlDeviceGetSerial(Device device, char *out, unsigned int size)
{
	char text[64];

	ENTER(device);
	if (standin_text("serial", device->gpu, text, sizeof(text)))
		snprintf(text, sizeof(text), "13240220%05d", device->gpu);
	return give(text, out, size);
}

Return nvmlDeviceGetName(Device device, char *out, unsigned int size)
{
	ENTER(device);
	return give(described(device).model, out, size);
}

Return nvmlDeviceGetVbiosVersion(Device device, char *out, unsigned int size)
{
	ENTER(device);
	return give("92.00.45.00.03", out, size);
}

Return nvmlDeviceGetArchitecture(Device device, unsigned int *architecture)
{
	ENTER(device);
	*architecture = number("architecture", device, 7); /* Ampere */
	return OK;
}

Return nvmlDeviceGetCudaComputeCapability(Device device, int *major, int *minor)
{
	ENTER(device);
	*major = number("capability_major", device, 8);
	*minor = number("capability_minor", device, 0);
	return OK;
}

Return nvmlDeviceGetGspFirmwareVersion(Device device, char *version)
{
	ENTER(device);
	if (!number("gsp", device, 1))
		return NOT_SUPPORTED;
	strcpy(version, STANDIN_VERSION);
	return OK;
}

Return nvmlDeviceGetGspFirmwareMode(Device device, unsigned int *enabled, unsigned int *by_default)
{
	ENTER(device);
	*enabled = *by_default = number("gsp", device, 1);
	return OK;
}

struct pci_info {
	char legacy[16];
	unsigned int domain, bus, device, device_id, subsystem_id;
	char address[32];
};

Return nvmlDeviceGetPciInfo_v3(Device device, struct pci_info *info)
{
	struct standin_gpu gpu;

	ENTER(device);
	gpu = described(device);
	memset(info, 0, sizeof(*info));
	sscanf(gpu.address, "%x:%x:%x", &info->domain, &info->bus, &info->device);
	snprintf(info->legacy, sizeof(info->legacy), "%.15s", gpu.address);
	snprintf(info->address, sizeof(info->address), "%08X:%02X:%02X.0", info->domain, info->bus & 0xff,
		 info->device & 0xff);
	info->device_id = 0x20b210de;
	info->subsystem_id = 0x147f10de;
	return OK;
}

Return nvmlDeviceGetPciInfo_v2(Device device, struct pci_info *info)
{
	return nvmlDeviceGetPciInfo_v3(device, info);
}

#define NUMBER_GETTER(name, key, otherwise)                                                                            \
	Return name(Device device, unsigned int *out)                                                                  \
	{                                                                                                              \
		ENTER(device);                                                                                         \
		*out = number(key, device, otherwise);                                                                 \
		return OK;                                                                                             \
	}

NUMBER_GETTER(nvmlDeviceGetCurrPcieLinkGeneration, "pcie_gen", 4)
NUMBER_GETTER(nvmlDeviceGetMaxPcieLinkGeneration, "pcie_gen_max", 4)
NUMBER_GETTER(nvmlDeviceGetCurrPcieLinkWidth, "pcie_width", 16)
NUMBER_GETTER(nvmlDeviceGetMaxPcieLinkWidth, "pcie_width_max", 16)
NUMBER_GETTER(nvmlDeviceGetPowerUsage, "power_mw", 60000)
NUMBER_GETTER(nvmlDeviceGetPerformanceState, "pstate", 0)

Return nvmlDeviceGetNvLinkState(Device device, unsigned int link, unsigned int *active)
{
	ENTER(device);
	if ((long)link >= number("nvlinks", device, 0))
		return INVALID_ARGUMENT;
	*active = number("nvlink_down", device, -1) != (long)link;
	return OK;
}

Return nvmlDeviceGetTemperature(Device device, int sensor, unsigned int *celsius)
{
	(void)sensor;
	ENTER(device);
	*celsius = number("temperature", device, 34);
	return OK;
}

struct memory {
	unsigned long long total, free, used;
};

struct memory_v2 {
	unsigned int version;
	unsigned long long total, reserved, free, used;
};

Return nvmlDeviceGetMemoryInfo(Device device, struct memory *memory)
{
	ENTER(device);
	memory->total = (unsigned long long)number("mem_total_mib", device, 81920) << 20;
	memory->used = (unsigned long long)number("mem_used_mib", device, 4) << 20;
	memory->free = memory->total - memory->used;
	return OK;
}

Return nvmlDeviceGetMemoryInfo_v2(Device device, struct memory_v2 *memory)
{
	struct memory plain;
	Return result = nvmlDeviceGetMemoryInfo(device, &plain);

	if (result)
		return result;
	memory->total = plain.total;
	memory->used = plain.used;
	memory->free = plain.free;
	memory->reserved = 0;
	return OK;
}

struct utilization {
	unsigned int gpu, memory;
};

Return nvmlDeviceGetUtilizationRates(Device device, struct utilization *rates)
{
	ENTER(device);
	rates->gpu = number("utilization", device, 0);
	rates->memory = 0;
	return OK;
}

/* --- processes: whoever has the node open, so the list cannot be false -------------------------------------------- */

struct process_v1 {
	unsigned int pid;
	unsigned long long memory;
};

struct process {
	unsigned int pid;
	unsigned long long memory;
	unsigned int gi, ci;
};

Return nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned int *count, struct process *out)
{
	unsigned int pids[256], room = *count, found;

	ENTER(device);
	found = standin_holders(described(device).minor, pids, 256);
	for (unsigned int i = 0; out && i < found && i < room && i < 256; i++)
		out[i] = (struct process){pids[i], (unsigned long long)number("proc_used_mib", device, 512) << 20, -1u, -1u};
	*count = found;
	return found > room ? INSUFFICIENT_SIZE : OK;
}

Return nvmlDeviceGetComputeRunningProcesses_v2(Device device, unsigned int *count, struct process *out)
{
	return nvmlDeviceGetComputeRunningProcesses_v3(device, count, out);
}

Return nvmlDeviceGetComputeRunningProcesses(Device device, unsigned int *count, struct process_v1 *out)
{
	struct process full[256];
	unsigned int room = *count, asked = room < 256 ? room : 256;
	Return result = nvmlDeviceGetComputeRunningProcesses_v3(device, &asked, full);

	for (unsigned int i = 0; !result && out && i < asked; i++)
		out[i] = (struct process_v1){full[i].pid, full[i].memory};
	*count = asked;
	return result;
}

Return nvmlDeviceGetGraphicsRunningProcesses_v3(Device device, unsigned int *count, struct process *out)
{
	(void)out;
	ENTER(device);
	*count = 0;
	return OK;
}

Return nvmlDeviceGetMPSComputeRunningProcesses_v3(Device device, unsigned int *count, struct process *out)
{
	return nvmlDeviceGetGraphicsRunningProcesses_v3(device, count, out);
}

/* --- settings the driver forgets when it is unloaded -------------------------------------------------------------- */

Return nvmlDeviceGetPersistenceMode(Device device, unsigned int *mode)
{
	ENTER(device);
	*mode = number("persistence", device, 0);
	return OK;
}

Return nvmlDeviceSetPersistenceMode(Device device, unsigned int mode)
{
	ENTER_AS_ROOT(device);
	return mode > 1 ? INVALID_ARGUMENT : keep(LOADED, "persistence", device, mode);
}

Return nvmlDeviceGetComputeMode(Device device, unsigned int *mode)
{
	ENTER(device);
	*mode = number("compute_mode", device, 0);
	return OK;
}

Return nvmlDeviceSetComputeMode(Device device, unsigned int mode)
{
	ENTER_AS_ROOT(device);
	return mode > 3 ? INVALID_ARGUMENT : keep(LOADED, "compute_mode", device, mode);
}

Return nvmlDeviceGetAccountingMode(Device device, unsigned int *mode)
{
	ENTER(device);
	*mode = number("accounting", device, 0);
	return OK;
}

Return nvmlDeviceSetAccountingMode(Device device, unsigned int mode)
{
	ENTER_AS_ROOT(device);
	return mode > 1 ? INVALID_ARGUMENT : keep(LOADED, "accounting", device, mode);
}

#define POWER_MIN 100000
#define POWER_MAX 400000

Return nvmlDeviceGetPowerManagementLimit(Device device, unsigned int *milliwatt)
{
	ENTER(device);
	*milliwatt = number("power_limit_mw", device, POWER_MAX);
	return OK;
}

Return nvmlDeviceGetEnforcedPowerLimit(Device device, unsigned int *milliwatt)
{
	return nvmlDeviceGetPowerManagementLimit(device, milliwatt);
}

Return nvmlDeviceGetPowerManagementDefaultLimit(Device device, unsigned int *milliwatt)
{
	ENTER(device);
	*milliwatt = POWER_MAX;
	return OK;
}

Return nvmlDeviceGetPowerManagementLimitConstraints(Device device, unsigned int *least, unsigned int *most)
{
	ENTER(device);
	*least = POWER_MIN;
	*most = POWER_MAX;
	return OK;
}

Return nvmlDeviceSetPowerManagementLimit(Device device, unsigned int milliwatt)
{
	ENTER_AS_ROOT(device);
	if (milliwatt < POWER_MIN || milliwatt > POWER_MAX)
		return INVALID_ARGUMENT;
	return keep(LOADED, "power_limit_mw", device, milliwatt);
}

enum { CLOCK_GRAPHICS, CLOCK_SM, CLOCK_MEMORY, CLOCK_VIDEO };
static const unsigned int clock_max[] = {1410, 1410, 1593, 1290};
static const unsigned int clock_application[] = {1275, 1275, 1593, 1275};

static Return keep_range(const char *key, Device device, unsigned int least, unsigned int most)
{
	char text[48];

	snprintf(text, sizeof(text), "%u,%u", least, most);
	return standin_keep(LOADED, key, device->gpu, text) ? UNKNOWN : OK;
}

Return nvmlDeviceSetGpuLockedClocks(Device device, unsigned int least, unsigned int most)
{
	ENTER_AS_ROOT(device);
	return least > most ? INVALID_ARGUMENT : keep_range("locked_gpu_clocks", device, least, most);
}

Return nvmlDeviceResetGpuLockedClocks(Device device)
{
	ENTER_AS_ROOT(device);
	return standin_keep(LOADED, "locked_gpu_clocks", device->gpu, NULL) ? UNKNOWN : OK;
}

Return nvmlDeviceSetMemoryLockedClocks(Device device, unsigned int least, unsigned int most)
{
	ENTER_AS_ROOT(device);
	return least > most ? INVALID_ARGUMENT : keep_range("locked_memory_clocks", device, least, most);
}

Return nvmlDeviceResetMemoryLockedClocks(Device device)
{
	ENTER_AS_ROOT(device);
	return standin_keep(LOADED, "locked_memory_clocks", device->gpu, NULL) ? UNKNOWN : OK;
}

Return nvmlDeviceGetMaxClockInfo(Device device, unsigned int type, unsigned int *mhz)
{
	ENTER(device);
	if (type > CLOCK_VIDEO)
		return INVALID_ARGUMENT;
	*mhz = clock_max[type];
	return OK;
}

Return nvmlDeviceGetClockInfo(Device device, unsigned int type, unsigned int *mhz)
{
	char text[64];
	unsigned int least;
	const char *key = type == CLOCK_MEMORY ? "locked_memory_clocks" : "locked_gpu_clocks";
	Return result = nvmlDeviceGetMaxClockInfo(device, type, mhz);

	if (!result && !standin_text(key, device->gpu, text, sizeof(text)))
		sscanf(text, "%u,%u", &least, mhz);
	return result;
}

Return nvmlDeviceGetDefaultApplicationsClock(Device device, unsigned int type, unsigned int *mhz)
{
	ENTER(device);
	if (type > CLOCK_VIDEO)
		return INVALID_ARGUMENT;
	*mhz = clock_application[type];
	return OK;
}

Return nvmlDeviceGetApplicationsClock(Device device, unsigned int type, unsigned int *mhz)
{
	Return result = nvmlDeviceGetDefaultApplicationsClock(device, type, mhz);

	if (!result)
		*mhz = number(type == CLOCK_MEMORY ? "application_memory_mhz" : "application_graphics_mhz", device, *mhz);
	return result;
}

Return nvmlDeviceSetApplicationsClocks(Device device, unsigned int memory, unsigned int graphics)
{
	ENTER_AS_ROOT(device);
	if (memory > clock_max[CLOCK_MEMORY] || graphics > clock_max[CLOCK_GRAPHICS])
		return INVALID_ARGUMENT;
	if (keep(LOADED, "application_memory_mhz", device, memory))
		return UNKNOWN;
	return keep(LOADED, "application_graphics_mhz", device, graphics);
}

Return nvmlDeviceResetApplicationsClocks(Device device)
{
	ENTER_AS_ROOT(device);
	if (standin_keep(LOADED, "application_memory_mhz", device->gpu, NULL))
		return UNKNOWN;
	return standin_keep(LOADED, "application_graphics_mhz", device->gpu, NULL) ? UNKNOWN : OK;
}

/* --- ECC and row remapping: the mode is in the InfoROM and becomes current at the next load ----------------------- */

Return nvmlDeviceGetEccMode(Device device, unsigned int *current, unsigned int *pending)
{
	long mode;

	ENTER(device);
	mode = number("ecc", device, 1);
	if (mode < 0)
		return NOT_SUPPORTED;
	*current = mode;
	*pending = number("ecc_pending", device, mode);
	return OK;
}

Return nvmlDeviceSetEccMode(Device device, unsigned int mode)
{
	ENTER_AS_ROOT(device);
	if (number("ecc", device, 1) < 0)
		return NOT_SUPPORTED;
	return mode > 1 ? INVALID_ARGUMENT : keep(INFOROM, "ecc_pending", device, mode);
}

enum { CORRECTED, UNCORRECTED };
enum { VOLATILE, AGGREGATE };

Return nvmlDeviceGetTotalEccErrors(Device device, unsigned int kind, unsigned int counter, unsigned long long *count)
{
	ENTER(device);
	if (number("ecc", device, 1) <= 0)
		return NOT_SUPPORTED;
	if (kind == CORRECTED)
		*count = number(counter == AGGREGATE ? "ecc_corrected_aggregate" : "ecc_corrected", device, 0);
	else
		*count = number(counter == AGGREGATE ? "ecc_uncorrected_aggregate" : "ecc_uncorrected", device, 0);
	return OK;
}

Return nvmlDeviceGetMemoryErrorCounter(Device device, unsigned int kind, unsigned int counter, unsigned int location,
				       unsigned long long *count)
{
	(void)location;
	return nvmlDeviceGetTotalEccErrors(device, kind, counter, count);
}

Return nvmlDeviceGetRemappedRows(Device device, unsigned int *correctable, unsigned int *uncorrectable,
				 unsigned int *pending, unsigned int *failed)
{
	ENTER(device);
	*correctable = number("remapped_correctable", device, 0);
	*uncorrectable = number("remapped_uncorrectable", device, 0);
	*pending = number("remap_pending", device, 0);
	*failed = number("remap_failure", device, 0);
	return OK;
}

Return nvmlDeviceGetRetiredPagesPendingStatus(Device device, unsigned int *pending)
{
	(void)pending;
	ENTER(device);
	return NOT_SUPPORTED; /* Ampere and later remap rows instead */
}

/* --- fabric ------------------------------------------------------------------------------------------------------- */

struct fabric {
	unsigned char cluster[16];
	unsigned int status, clique;
	unsigned char state;
};

struct fabric_v {
	unsigned int version;
	unsigned char cluster[16];
	unsigned int status, clique;
	unsigned char state;
	unsigned int health;
};

Return nvmlDeviceGetGpuFabricInfo(Device device, struct fabric *info)
{
	ENTER(device);
	memset(info, 0, sizeof(*info));
	info->state = number("fabric_state", device, 0);
	info->status = number("fabric_status", device, 0);
	info->clique = number("fabric_clique", device, 0);
	return OK;
}

Return nvmlDeviceGetGpuFabricInfoV(Device device, struct fabric_v *info)
{
	ENTER(device);
	memset(info->cluster, 0, sizeof(info->cluster));
	info->state = number("fabric_state", device, 0);
	info->status = number("fabric_status", device, 0);
	info->clique = number("fabric_clique", device, 0);
	info->health = 0;
	return OK;
}

/* --- MIG ---------------------------------------------------------------------------------------------------------- */
/* As on an A100 80GB: 7 compute slices, 8 memory slices. Layout in the LOADED layer:
 *   gi.<gpu>=<id>:<profile id>:<start>[,...]     ci.<gpu>=<gi id>:<id>:<profile id>:<start>[,...] */

struct gi_profile {
	unsigned int profile, id, slices, memory_slices, count, megabytes;
	const char *name;
	unsigned int starts[8];
};

static const struct gi_profile gi_profiles[] = {
	{0, 19, 1, 1, 7, 9728, "1g.10gb", {0, 1, 2, 3, 4, 5, 6}},
	{1, 14, 2, 2, 3, 19968, "2g.20gb", {0, 2, 4}},
	{2, 9, 3, 4, 2, 40192, "3g.40gb", {0, 4}},
	{3, 5, 4, 4, 1, 40192, "4g.40gb", {0}},
	{4, 0, 7, 8, 1, 80896, "7g.80gb", {0}},
	{9, 15, 1, 2, 4, 19968, "1g.20gb", {0, 2, 4, 6}},
};
#define GI_PROFILES (sizeof(gi_profiles) / sizeof(gi_profiles[0]))
static const unsigned int ci_slices[] = {1, 2, 3, 4, 7}; /* index = profile = profile id */
#define CI_PROFILES (sizeof(ci_slices) / sizeof(ci_slices[0]))

struct gi {
	int id, profile, start;
};

struct ci {
	int gi, id, profile, start;
};

struct layout {
	int gis, cis;
	struct gi gi[MAX_GI];
	struct ci ci[MAX_GI * MAX_CI];
};

static struct layout layout_read(int gpu)
{
	struct layout layout = {0};
	char text[900];

	if (!standin_text("gi", gpu, text, sizeof(text)))
		for (char *word = strtok(text, ","); word && layout.gis < MAX_GI; word = strtok(NULL, ",")) {
			struct gi *gi = &layout.gi[layout.gis];

			layout.gis += sscanf(word, "%d:%d:%d", &gi->id, &gi->profile, &gi->start) == 3;
		}
	if (!standin_text("ci", gpu, text, sizeof(text)))
		for (char *word = strtok(text, ","); word && layout.cis < MAX_GI * MAX_CI; word = strtok(NULL, ",")) {
			struct ci *ci = &layout.ci[layout.cis];

			layout.cis += sscanf(word, "%d:%d:%d:%d", &ci->gi, &ci->id, &ci->profile, &ci->start) == 4;
		}
	return layout;
}

static Return layout_write(int gpu, const struct layout *layout)
{
	char text[900];
	int length = 0;

	text[0] = 0;
	for (int i = 0; i < layout->gis; i++)
		length += snprintf(text + length, sizeof(text) - length, "%s%d:%d:%d", i ? "," : "", layout->gi[i].id,
				   layout->gi[i].profile, layout->gi[i].start);
	if (standin_keep(LOADED, "gi", gpu, layout->gis ? text : NULL))
		return UNKNOWN;
	text[0] = 0;
	length = 0;
	for (int i = 0; i < layout->cis; i++)
		length += snprintf(text + length, sizeof(text) - length, "%s%d:%d:%d:%d", i ? "," : "", layout->ci[i].gi,
				   layout->ci[i].id, layout->ci[i].profile, layout->ci[i].start);
	return standin_keep(LOADED, "ci", gpu, layout->cis ? text : NULL) ? UNKNOWN : OK;
}

static const struct gi_profile *gi_profile(unsigned int profile_id)
{
	for (size_t i = 0; i < GI_PROFILES; i++)
		if (gi_profiles[i].id == profile_id)
			return &gi_profiles[i];
	return NULL;
}

static struct gi *gi_of(struct layout *layout, int id)
{
	for (int i = 0; i < layout->gis; i++)
		if (layout->gi[i].id == id)
			return &layout->gi[i];
	return NULL;
}

Return nvmlDeviceGetMigMode(Device device, unsigned int *current, unsigned int *pending)
{
	long mode;

	ENTER(device);
	mode = number("mig", device, 0);
	if (mode < 0)
		return NOT_SUPPORTED;
	*current = mode;
	*pending = number("mig_pending", device, mode);
	return OK;
}

/* Takes effect at once on an idle GPU; otherwise it stays pending until the driver is loaded anew. */
Return nvmlDeviceSetMigMode(Device device, unsigned int mode, Return *activation)
{
	unsigned int pid;

	ENTER_AS_ROOT(device);
	if (number("mig", device, 0) < 0)
		return NOT_SUPPORTED;
	if (mode > 1)
		return INVALID_ARGUMENT;
	if (keep(INFOROM, "mig_pending", device, mode))
		return UNKNOWN;
	*activation = standin_holders(described(device).minor, &pid, 1) ? IN_USE : OK;
	if (*activation)
		return OK;
	if (!mode) {
		struct layout empty = {0};

		layout_write(device->gpu, &empty);
	}
	return keep(LOADED, "mig", device, mode);
}

Return nvmlDeviceGetMaxMigDeviceCount(Device device, unsigned int *count)
{
	ENTER(device);
	*count = number("mig", device, 0) > 0 ? 7 : 0;
	return OK;
}

struct placement {
	unsigned int start, size;
};

struct gi_profile_info {
	unsigned int id, p2p, slices, count, multiprocessors, copy, decoders, encoders, jpeg, ofa;
	unsigned long long megabytes;
};

struct gi_profile_info_v2 {
	unsigned int version, id, p2p, slices, count, multiprocessors, copy, decoders, encoders, jpeg, ofa;
	unsigned long long megabytes;
	char name[96];
};

Return nvmlDeviceGetGpuInstanceProfileInfo(Device device, unsigned int profile, struct gi_profile_info *info)
{
	ENTER(device);
	if (number("mig", device, 0) < 0)
		return NOT_SUPPORTED;
	for (size_t i = 0; i < GI_PROFILES; i++) {
		const struct gi_profile *known = &gi_profiles[i];

		if (known->profile == profile) {
			*info = (struct gi_profile_info){known->id, 0, known->slices, known->count, known->slices * 14,
							 known->slices, known->memory_slices / 2, 0, 0, 0, known->megabytes};
			return OK;
		}
	}
	return profile > 15 ? INVALID_ARGUMENT : NOT_SUPPORTED;
}

Return nvmlDeviceGetGpuInstanceProfileInfoV(Device device, unsigned int profile, struct gi_profile_info_v2 *info)
{
	struct gi_profile_info plain;
	Return result = nvmlDeviceGetGpuInstanceProfileInfo(device, profile, &plain);

	if (result)
		return result;
	info->id = plain.id;
	info->p2p = 0;
	info->slices = plain.slices;
	info->count = plain.count;
	info->multiprocessors = plain.multiprocessors;
	info->copy = plain.copy;
	info->decoders = plain.decoders;
	info->encoders = info->jpeg = info->ofa = 0;
	info->megabytes = plain.megabytes;
	snprintf(info->name, sizeof(info->name), "MIG %s", gi_profile(plain.id)->name);
	return OK;
}

Return nvmlDeviceGetGpuInstancePossiblePlacements_v2(Device device, unsigned int profile_id, struct placement *out,
						     unsigned int *count)
{
	const struct gi_profile *profile = gi_profile(profile_id);

	ENTER(device);
	if (!profile)
		return INVALID_ARGUMENT;
	for (unsigned int i = 0; out && i < profile->count && i < *count; i++)
		out[i] = (struct placement){profile->starts[i], profile->memory_slices};
	*count = profile->count;
	return OK;
}

static int gi_free(const struct layout *layout, const struct gi_profile *profile, unsigned int start)
{
	unsigned int slices = profile->slices;

	for (int i = 0; i < layout->gis; i++) {
		const struct gi_profile *other = gi_profile(layout->gi[i].profile);
		unsigned int other_start = layout->gi[i].start;

		if (start < other_start + other->memory_slices && other_start < start + profile->memory_slices)
			return 0;
		slices += other->slices;
	}
	return slices <= 7;
}

/* start < 0: the first place that is free. */
static Return gi_create(Device device, unsigned int profile_id, int start, GpuInstance *out)
{
	const struct gi_profile *profile = gi_profile(profile_id);
	struct layout layout;
	int id = 1;

	if (geteuid())
		return NO_PERMISSION;
	if (number("mig", device, 0) <= 0)
		return NOT_SUPPORTED;
	if (!profile)
		return INVALID_ARGUMENT;
	layout = layout_read(device->gpu);
	for (unsigned int i = 0; i < profile->count; i++) {
		if (start >= 0 && profile->starts[i] != (unsigned int)start)
			continue;
		if (!gi_free(&layout, profile, profile->starts[i]))
			continue;
		while (gi_of(&layout, id))
			id++;
		layout.gi[layout.gis++] = (struct gi){id, profile_id, profile->starts[i]};
		*out = part(device->gpu, id, -1);
		return layout_write(device->gpu, &layout);
	}
	return INSUFFICIENT_RESOURCES;
}

Return nvmlDeviceCreateGpuInstance(Device device, unsigned int profile_id, GpuInstance *out)
{
	ENTER(device);
	return gi_create(device, profile_id, -1, out);
}

Return nvmlDeviceCreateGpuInstanceWithPlacement(Device device, unsigned int profile_id, const struct placement *where,
						GpuInstance *out)
{
	ENTER(device);
	return gi_create(device, profile_id, where->start, out);
}

Return nvmlDeviceGetGpuInstances(Device device, unsigned int profile_id, GpuInstance *out, unsigned int *count)
{
	struct layout layout;

	ENTER(device);
	if (number("mig", device, 0) <= 0)
		return NOT_SUPPORTED;
	layout = layout_read(device->gpu);
	*count = 0;
	for (int i = 0; i < layout.gis; i++)
		if (layout.gi[i].profile == (int)profile_id)
			out[(*count)++] = part(device->gpu, layout.gi[i].id, -1);
	return OK;
}

Return nvmlDeviceGetGpuInstanceById(Device device, unsigned int id, GpuInstance *out)
{
	struct layout layout;

	ENTER(device);
	layout = layout_read(device->gpu);
	if (!gi_of(&layout, id))
		return NOT_FOUND;
	*out = part(device->gpu, id, -1);
	return OK;
}

struct gi_info {
	Device device;
	unsigned int id, profile_id;
	struct placement placement;
};

Return nvmlGpuInstanceGetInfo(GpuInstance handle, struct gi_info *info)
{
	struct layout layout;
	struct gi *gi;

	ENTER(handle);
	layout = layout_read(handle->gpu);
	gi = gi_of(&layout, handle->gi);
	if (!gi)
		return NOT_FOUND;
	*info = (struct gi_info){&whole[handle->gpu], gi->id, gi->profile,
				 {gi->start, gi_profile(gi->profile)->memory_slices}};
	return OK;
}

Return nvmlGpuInstanceDestroy(GpuInstance handle)
{
	struct layout layout;
	struct gi *gi;

	ENTER_AS_ROOT(handle);
	layout = layout_read(handle->gpu);
	gi = gi_of(&layout, handle->gi);
	if (!gi)
		return NOT_FOUND;
	for (int i = 0; i < layout.cis; i++)
		if (layout.ci[i].gi == gi->id)
			return IN_USE;
	*gi = layout.gi[--layout.gis];
	return layout_write(handle->gpu, &layout);
}

struct ci_profile_info {
	unsigned int id, slices, count, multiprocessors, copy, decoders, encoders, jpeg, ofa;
};

Return nvmlGpuInstanceGetComputeInstanceProfileInfo(GpuInstance handle, unsigned int profile, unsigned int engine,
						    struct ci_profile_info *info)
{
	struct layout layout;
	struct gi *gi;
	unsigned int slices;

	(void)engine;
	ENTER(handle);
	layout = layout_read(handle->gpu);
	gi = gi_of(&layout, handle->gi);
	if (!gi)
		return NOT_FOUND;
	slices = gi_profile(gi->profile)->slices;
	if (profile >= CI_PROFILES || ci_slices[profile] > slices)
		return NOT_SUPPORTED;
	*info = (struct ci_profile_info){profile, ci_slices[profile], slices / ci_slices[profile], ci_slices[profile] * 14,
					 slices, slices / 2, 0, 0, 0};
	return OK;
}

struct ci_profile_info_v2 {
	unsigned int version;
	struct ci_profile_info plain;
	char name[96];
};

Return nvmlGpuInstanceGetComputeInstanceProfileInfoV(GpuInstance handle, unsigned int profile, unsigned int engine,
						     struct ci_profile_info_v2 *info)
{
	Return result = nvmlGpuInstanceGetComputeInstanceProfileInfo(handle, profile, engine, &info->plain);

	if (!result)
		snprintf(info->name, sizeof(info->name), "MIG %uc", info->plain.slices);
	return result;
}

static Return ci_create(GpuInstance handle, unsigned int profile, int start, ComputeInstance *out)
{
	struct layout layout = layout_read(handle->gpu);
	struct gi *gi = gi_of(&layout, handle->gi);
	unsigned int taken = 0;
	int id = 0;

	if (geteuid())
		return NO_PERMISSION;
	if (!gi)
		return NOT_FOUND;
	if (profile >= CI_PROFILES)
		return INVALID_ARGUMENT;
	for (int i = 0; i < layout.cis; i++)
		if (layout.ci[i].gi == gi->id) {
			taken += ci_slices[layout.ci[i].profile];
			id = layout.ci[i].id >= id ? layout.ci[i].id + 1 : id;
		}
	if (taken + ci_slices[profile] > gi_profile(gi->profile)->slices || id >= MAX_CI)
		return INSUFFICIENT_RESOURCES;
	layout.ci[layout.cis++] = (struct ci){gi->id, id, profile, start >= 0 ? start : (int)taken};
	*out = part(handle->gpu, gi->id, id);
	return layout_write(handle->gpu, &layout);
}

Return nvmlGpuInstanceCreateComputeInstance(GpuInstance handle, unsigned int profile_id, ComputeInstance *out)
{
	ENTER(handle);
	return ci_create(handle, profile_id, -1, out);
}

Return nvmlGpuInstanceCreateComputeInstanceWithPlacement(GpuInstance handle, unsigned int profile_id,
							 const struct placement *where, ComputeInstance *out)
{
	ENTER(handle);
	return ci_create(handle, profile_id, where->start, out);
}

Return nvmlGpuInstanceGetComputeInstances(GpuInstance handle, unsigned int profile_id, ComputeInstance *out,
					  unsigned int *count)
{
	struct layout layout;

	ENTER(handle);
	layout = layout_read(handle->gpu);
	*count = 0;
	for (int i = 0; i < layout.cis; i++)
		if (layout.ci[i].gi == handle->gi && layout.ci[i].profile == (int)profile_id)
			out[(*count)++] = part(handle->gpu, handle->gi, layout.ci[i].id);
	return OK;
}

static struct ci *ci_of(struct layout *layout, const Handle *handle)
{
	for (int i = 0; i < layout->cis; i++)
		if (layout->ci[i].gi == handle->gi && layout->ci[i].id == handle->ci)
			return &layout->ci[i];
	return NULL;
}

Return nvmlGpuInstanceGetComputeInstanceById(GpuInstance handle, unsigned int id, ComputeInstance *out)
{
	Handle wanted = {handle->gpu, handle->gi, id};
	struct layout layout;

	ENTER(handle);
	layout = layout_read(handle->gpu);
	if (!ci_of(&layout, &wanted))
		return NOT_FOUND;
	*out = part(handle->gpu, handle->gi, id);
	return OK;
}

struct ci_info {
	Device device;
	GpuInstance gi;
	unsigned int id, profile_id;
	struct placement placement;
};

Return nvmlComputeInstanceGetInfo_v2(ComputeInstance handle, struct ci_info *info)
{
	struct layout layout;
	struct ci *ci;

	ENTER(handle);
	layout = layout_read(handle->gpu);
	ci = ci_of(&layout, handle);
	if (!ci)
		return NOT_FOUND;
	*info = (struct ci_info){&whole[handle->gpu], part(handle->gpu, handle->gi, -1), ci->id, ci->profile,
				 {ci->start, ci_slices[ci->profile]}};
	return OK;
}

Return nvmlComputeInstanceDestroy(ComputeInstance handle)
{
	struct layout layout;
	struct ci *ci;

	ENTER_AS_ROOT(handle);
	layout = layout_read(handle->gpu);
	ci = ci_of(&layout, handle);
	if (!ci)
		return NOT_FOUND;
	*ci = layout.ci[--layout.cis];
	return layout_write(handle->gpu, &layout);
}

Return nvmlDeviceGetMigDeviceHandleByIndex(Device device, unsigned int index, Device *out)
{
	struct layout layout;

	ENTER(device);
	if (number("mig", device, 0) <= 0)
		return NOT_SUPPORTED;
	layout = layout_read(device->gpu);
	if (index >= (unsigned int)layout.cis)
		return NOT_FOUND;
	*out = part(device->gpu, layout.ci[index].gi, layout.ci[index].id);
	return OK;
}

Return nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device device, Device *out)
{
	ENTER(device);
	*out = &whole[device->gpu];
	return OK;
}

Return nvmlDeviceIsMigDeviceHandle(Device device, unsigned int *answer)
{
	ENTER(device);
	*answer = device->ci >= 0;
	return OK;
}

Return nvmlDeviceGetGpuInstanceId(Device device, unsigned int *id)
{
	ENTER(device);
	if (device->gi < 0)
		return NOT_SUPPORTED;
	*id = device->gi;
	return OK;
}

Return nvmlDeviceGetComputeInstanceId(Device device, unsigned int *id)
{
	ENTER(device);
	if (device->ci < 0)
		return NOT_SUPPORTED;
	*id = device->ci;
	return OK;
}

struct attributes {
	unsigned int multiprocessors, copy, decoders, encoders, jpeg, ofa, gi_slices, ci_slices;
	unsigned long long megabytes;
};

Return nvmlDeviceGetAttributes_v2(Device device, struct attributes *out)
{
	struct layout layout;
	const struct gi_profile *profile;
	struct ci *ci;
	struct gi *gi;

	ENTER(device);
	layout = layout_read(device->gpu);
	ci = ci_of(&layout, device);
	gi = ci ? gi_of(&layout, ci->gi) : NULL;
	if (!gi)
		return NOT_SUPPORTED;
	profile = gi_profile(gi->profile);
	*out = (struct attributes){ci_slices[ci->profile] * 14, profile->slices, profile->memory_slices / 2, 0, 0, 0,
				   profile->slices, ci_slices[ci->profile], profile->megabytes};
	return OK;
}
