/* SPDX-License-Identifier: GPL-3.0-or-later */
/*
 * Stand-in for nvidia-smi, over the stand-in NVML: what scripts ask of it, in NVIDIA's words and exit codes.
 *   nvidia-smi                                   short table          nvidia-smi -L     GPUs and MIG devices
 *   nvidia-smi --query-gpu=FIELDS [--format=...] nvidia-smi --query-compute-apps=FIELDS [--format=...]
 *   nvidia-smi [-i N] -pm|-pl|-c|-e|-mig VALUE   nvidia-smi -lgc MIN,MAX | -rgc | -ac MEM,GPU | -rac
 *   nvidia-smi mig [-i N] -cgi ID[:START],.. [-C] | [-gi ID] -cci ID,.. | -dgi | -dci | -lgi | -lci
 * N is an index or a UUID.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

typedef void *Device;
typedef unsigned int uint;

static void *library;
static int only = -1;          /* -i */
static int only_instance = -1; /* -gi */

static int missing(void)
{
	return 13; /* NVML_ERROR_FUNCTION_NOT_FOUND */
}

static void *nvml(const char *name)
{
	void *found = dlsym(library, name);

	return found ? found : (void *)missing;
}

/* CALL(nvmlDeviceGetCount_v2, (uint *), &n): the prototype is given where the function is used. */
#define CALL(name, prototype, ...) ((int (*) prototype)nvml(#name))(__VA_ARGS__)

static const char *explain(int code)
{
	return ((const char *(*)(int))nvml("nvmlErrorString"))(code);
}

static uint gpu_count(void)
{
	uint count = 0;

	CALL(nvmlDeviceGetCount_v2, (uint *), &count);
	return count;
}

static int handle(uint index, Device *device)
{
	return CALL(nvmlDeviceGetHandleByIndex_v2, (uint, Device *), index, device);
}

/* Index of a GPU named by index or UUID; one past the last where there is none such. */
static int index_of(const char *word)
{
	uint count = gpu_count();

	if (strncmp(word, "GPU-", 4))
		return atoi(word);
	for (uint index = 0; index < count; index++) {
		char uuid[96] = "";
		Device device;

		if (!handle(index, &device))
			CALL(nvmlDeviceGetUUID, (Device, char *, uint), device, uuid, sizeof(uuid));
		if (!strcmp(uuid, word))
			return index;
	}
	return count;
}

static const char *on_off(uint value)
{
	return value ? "Enabled" : "Disabled";
}

/* --- queries ------------------------------------------------------------------------------------------------------ */

static int text_field(const char *field, Device device, char *out, uint size)
{
	static const struct {
		const char *field, *function;
	} known[] = {
		{"name", "nvmlDeviceGetName"},         {"gpu_name", "nvmlDeviceGetName"},
		{"uuid", "nvmlDeviceGetUUID"},         {"gpu_uuid", "nvmlDeviceGetUUID"},
		{"serial", "nvmlDeviceGetSerial"},     {"gpu_serial", "nvmlDeviceGetSerial"},
		{"vbios_version", "nvmlDeviceGetVbiosVersion"},
	};

	for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++)
		if (!strcmp(field, known[i].field))
			return ((int (*)(Device, char *, uint))nvml(known[i].function))(device, out, size);
	return -1;
}

static const char *compute_modes[] = {"Default", "Exclusive_Thread", "Prohibited", "Exclusive_Process"};

static void print_field(const char *field, uint index, Device device, int units)
{
	char text[128];
	uint a = 0, b = 0;
	struct {
		unsigned long long total, free, used;
	} memory = {0};
	struct {
		char legacy[16];
		uint domain, bus, device, id, subsystem;
		char address[32];
	} pci = {0};
	int result = text_field(field, device, text, sizeof(text));
	int handled = result >= 0;

	if (!handled && !strcmp(field, "index")) {
		snprintf(text, sizeof(text), "%u", index);
		result = 0;
	} else if (!strcmp(field, "count")) {
		snprintf(text, sizeof(text), "%u", gpu_count());
		result = 0;
	} else if (!strcmp(field, "driver_version")) {
		result = CALL(nvmlSystemGetDriverVersion, (char *, uint), text, sizeof(text));
	} else if (!strcmp(field, "pci.bus_id") || !strcmp(field, "gpu_bus_id")) {
		result = CALL(nvmlDeviceGetPciInfo_v3, (Device, void *), device, &pci);
		snprintf(text, sizeof(text), "%s", pci.address);
	} else if (!strcmp(field, "persistence_mode")) {
		result = CALL(nvmlDeviceGetPersistenceMode, (Device, uint *), device, &a);
		snprintf(text, sizeof(text), "%s", on_off(a));
	} else if (!strcmp(field, "compute_mode")) {
		result = CALL(nvmlDeviceGetComputeMode, (Device, uint *), device, &a);
		snprintf(text, sizeof(text), "%s", compute_modes[a & 3]);
	} else if (!strncmp(field, "mig.mode.", 9)) {
		result = CALL(nvmlDeviceGetMigMode, (Device, uint *, uint *), device, &a, &b);
		snprintf(text, sizeof(text), "%s", on_off(strcmp(field + 9, "pending") ? a : b));
	} else if (!strncmp(field, "ecc.mode.", 9)) {
		result = CALL(nvmlDeviceGetEccMode, (Device, uint *, uint *), device, &a, &b);
		snprintf(text, sizeof(text), "%s", on_off(strcmp(field + 9, "pending") ? a : b));
	} else if (!strcmp(field, "power.limit")) {
		result = CALL(nvmlDeviceGetPowerManagementLimit, (Device, uint *), device, &a);
		snprintf(text, sizeof(text), "%u.%02u%s", a / 1000, a % 1000 / 10, units ? " W" : "");
	} else if (!strcmp(field, "temperature.gpu")) {
		result = CALL(nvmlDeviceGetTemperature, (Device, int, uint *), device, 0, &a);
		snprintf(text, sizeof(text), "%u", a);
	} else if (!strncmp(field, "memory.", 7)) {
		result = CALL(nvmlDeviceGetMemoryInfo, (Device, void *), device, &memory);
		snprintf(text, sizeof(text), "%llu%s",
			 (!strcmp(field + 7, "total") ? memory.total : !strcmp(field + 7, "used") ? memory.used : memory.free) >> 20,
			 units ? " MiB" : "");
	} else if (!handled) {
		result = 3;
	}
	printf("%s", result == 3 || result == 13 ? "[N/A]" : result ? "[Unknown Error]" : text);
}

static char *fields_of(const char *argument)
{
	return strdup(strchr(argument, '=') + 1);
}

static void print_header(const char *list)
{
	char *copy = strdup(list), *save = NULL;

	for (char *word = strtok_r(copy, ",", &save); word; word = strtok_r(NULL, ",", &save))
		printf("%s%s", word == copy ? "" : ", ", word + strspn(word, " "));
	putchar('\n');
	free(copy);
}

static int query_gpus(const char *argument, const char *format)
{
	uint count = gpu_count();
	char *list = fields_of(argument);

	if (!strstr(format, "noheader"))
		print_header(list);
	for (uint index = 0; index < count; index++) {
		Device device;
		char *copy = strdup(list), *save = NULL;
		int first = 1, result;

		if (only >= 0 && index != (uint)only)
			continue;
		result = handle(index, &device);
		if (result) {
			printf("Unable to determine the device handle for GPU%u: %s. Reboot the system to recover this GPU\n", index,
			       explain(result));
			return result;
		}
		for (char *word = strtok_r(copy, ",", &save); word; word = strtok_r(NULL, ",", &save), first = 0) {
			printf("%s", first ? "" : ", ");
			print_field(word + strspn(word, " "), index, device, !strstr(format, "nounits"));
		}
		putchar('\n');
		free(copy);
	}
	free(list);
	return 0;
}

struct process {
	uint pid;
	unsigned long long memory;
	uint gi, ci;
};

static int query_processes(const char *argument, const char *format)
{
	uint count = gpu_count();
	char *list = fields_of(argument);

	if (!strstr(format, "noheader"))
		print_header(list);
	for (uint index = 0; index < count; index++) {
		struct process found[256];
		uint number = 256;
		Device device;

		if ((only >= 0 && index != (uint)only) || handle(index, &device))
			continue;
		if (CALL(nvmlDeviceGetComputeRunningProcesses_v3, (Device, uint *, struct process *), device, &number, found))
			continue;
		for (uint i = 0; i < number; i++) {
			char *copy = strdup(list), *save = NULL, text[256] = "";

			for (char *word = strtok_r(copy, ",", &save); word; word = strtok_r(NULL, ",", &save)) {
				const char *field = word + strspn(word, " ");

				printf("%s", word == copy ? "" : ", ");
				if (!strcmp(field, "pid")) {
					printf("%u", found[i].pid);
				} else if (!strcmp(field, "process_name") || !strcmp(field, "name")) {
					CALL(nvmlSystemGetProcessName, (uint, char *, uint), found[i].pid, text, sizeof(text));
					printf("%s", text);
				} else if (!strncmp(field, "used_", 5)) {
					printf("%llu%s", found[i].memory >> 20, strstr(format, "nounits") ? "" : " MiB");
				} else {
					print_field(field, index, device, 1);
				}
			}
			putchar('\n');
			free(copy);
		}
	}
	free(list);
	return 0;
}

static int list_gpus(void)
{
	uint count = gpu_count();

	for (uint index = 0; index < count; index++) {
		char name[96] = "", uuid[96] = "";
		Device device, mig;

		if (handle(index, &device))
			continue;
		CALL(nvmlDeviceGetName, (Device, char *, uint), device, name, sizeof(name));
		CALL(nvmlDeviceGetUUID, (Device, char *, uint), device, uuid, sizeof(uuid));
		printf("GPU %u: %s (UUID: %s)\n", index, name, uuid);
		for (uint i = 0; !CALL(nvmlDeviceGetMigDeviceHandleByIndex, (Device, uint, Device *), device, i, &mig); i++) {
			struct {
				uint sm, copy, dec, enc, jpeg, ofa, gi, ci;
				unsigned long long megabytes;
			} shape = {0};

			CALL(nvmlDeviceGetUUID, (Device, char *, uint), mig, uuid, sizeof(uuid));
			CALL(nvmlDeviceGetAttributes_v2, (Device, void *), mig, &shape);
			printf("  MIG %ug.%llugb     Device  %u: (UUID: %s)\n", shape.gi, (shape.megabytes + 1023) / 1024, i, uuid);
		}
	}
	return 0;
}

static int table(void)
{
	char version[80] = "";
	int cuda = 0;
	uint count = gpu_count();

	CALL(nvmlSystemGetDriverVersion, (char *, uint), version, sizeof(version));
	CALL(nvmlSystemGetCudaDriverVersion_v2, (int *), &cuda);
	printf("| NVIDIA-SMI %-14s Driver Version: %-14s CUDA Version: %d.%d     |\n", version, version, cuda / 1000,
	       cuda % 1000 / 10);
	for (uint index = 0; index < count; index++) {
		Device device;

		if (handle(index, &device))
			continue;
		printf("|   %u  ", index);
		print_field("name", index, device, 1);
		printf("  ");
		print_field("pci.bus_id", index, device, 1);
		printf("  ");
		print_field("memory.used", index, device, 1);
		puts(" |");
	}
	return 0;
}

/* --- settings ----------------------------------------------------------------------------------------------------- */

static int set_one(const char *option, const char *value, Device device, const char *address)
{
	uint number = value ? strtoul(value, NULL, 10) : 0, least = 0, most = 0;
	int result, activation = 0;

	if (value && sscanf(value, "%u,%u", &least, &most) == 1)
		most = least;
	if (!strcmp(option, "-pm")) {
		result = CALL(nvmlDeviceSetPersistenceMode, (Device, uint), device, number);
	} else if (!strcmp(option, "-pl")) {
		result = CALL(nvmlDeviceSetPowerManagementLimit, (Device, uint), device, number * 1000);
	} else if (!strcmp(option, "-e")) {
		result = CALL(nvmlDeviceSetEccMode, (Device, uint), device, number);
	} else if (!strcmp(option, "-mig")) {
		result = CALL(nvmlDeviceSetMigMode, (Device, uint, int *), device, number, &activation);
		if (!result && activation)
			printf("Warning: MIG mode is in pending enable state for GPU %s:%s\n", address, explain(activation));
	} else if (!strcmp(option, "-c")) {
		for (uint mode = 0; mode < 4; mode++)
			if (!strcasecmp(value, compute_modes[mode]))
				number = mode;
		result = CALL(nvmlDeviceSetComputeMode, (Device, uint), device, number);
	} else if (!strcmp(option, "-lgc")) {
		result = CALL(nvmlDeviceSetGpuLockedClocks, (Device, uint, uint), device, least, most);
	} else if (!strcmp(option, "-rgc")) {
		result = CALL(nvmlDeviceResetGpuLockedClocks, (Device), device);
	} else if (!strcmp(option, "-ac")) {
		result = CALL(nvmlDeviceSetApplicationsClocks, (Device, uint, uint), device, least, most);
	} else {
		result = CALL(nvmlDeviceResetApplicationsClocks, (Device), device);
	}
	if (result)
		printf("Unable to change the setting %s for GPU %s: %s\n", option, address, explain(result));
	else
		puts("All done.");
	return result;
}

typedef int Action(const char *option, const char *value, Device device, const char *gpu);

static int each_gpu(Action *action, const char *option, const char *value)
{
	uint count = gpu_count();
	int result = 0;

	for (uint index = 0; index < count; index++) {
		char address[16];
		Device device;

		if (only >= 0 && index != (uint)only)
			continue;
		snprintf(address, sizeof(address), "%u", index);
		if (!result && !(result = handle(index, &device)))
			result = action(option, value, device, address);
	}
	return result;
}

struct gi_info {
	Device device;
	uint id, profile, start, size;
};

struct ci_info {
	Device device, gi;
	uint id, profile, start, size;
};

static const uint gi_profile_ids[] = {19, 14, 9, 5, 0, 15};

static int compute_instances(const char *option, Device gi, uint gi_id, const char *gpu)
{
	int result = 0;

	for (uint profile = 0; profile < 5 && !result; profile++) {
		Device found[8];
		uint count = 8;

		if (CALL(nvmlGpuInstanceGetComputeInstances, (Device, uint, Device *, uint *), gi, profile, found, &count))
			continue;
		for (uint i = 0; i < count && !result; i++) {
			struct ci_info info;

			CALL(nvmlComputeInstanceGetInfo_v2, (Device, void *), found[i], &info);
			if (!strcmp(option, "-lci"))
				printf("GPU %s GPU instance %u compute instance %u profile %u placement %u:%u\n", gpu, gi_id, info.id,
				       info.profile, info.start, info.size);
			else
				result = CALL(nvmlComputeInstanceDestroy, (Device), found[i]);
		}
	}
	return result;
}

static int gpu_instances(const char *option, const char *value, Device device, const char *gpu)
{
	int result = 0, any = 0;

	(void)value;
	for (size_t i = 0; i < sizeof(gi_profile_ids) / sizeof(gi_profile_ids[0]) && !result; i++) {
		Device found[8];
		uint count = 8;

		if (CALL(nvmlDeviceGetGpuInstances, (Device, uint, Device *, uint *), device, gi_profile_ids[i], found, &count))
			continue;
		for (uint j = 0; j < count && !result; j++) {
			struct gi_info info;

			any = 1;
			CALL(nvmlGpuInstanceGetInfo, (Device, void *), found[j], &info);
			if (!strcmp(option, "-lgi"))
				printf("GPU %s GPU instance %u profile %u placement %u:%u\n", gpu, info.id, info.profile, info.start,
				       info.size);
			else if (!strcmp(option, "-dgi"))
				result = CALL(nvmlGpuInstanceDestroy, (Device), found[j]);
			else
				result = compute_instances(option, found[j], info.id, gpu);
		}
	}
	if (!any)
		puts("No GPU instances found: Not Found");
	if (result)
		printf("Failed on GPU %s: %s\n", gpu, explain(result));
	return result ? result : any ? 0 : 6;
}

/* The full-size compute instance of a GPU instance has the profile of its slice count. */
static const uint full_size[][2] = {{19, 0}, {15, 0}, {14, 1}, {9, 2}, {5, 3}, {0, 4}};

static int create_instances(const char *option, const char *value, Device device, const char *gpu)
{
	char *copy = strdup(value), *save = NULL;
	int result = 0, with_compute = !strcmp(option, "-C");

	for (char *word = strtok_r(copy, ",", &save); word && !result; word = strtok_r(NULL, ",", &save)) {
		struct {
			uint start, size;
		} place = {0};
		uint profile = strtoul(word, NULL, 10);
		struct gi_info info = {0};
		Device gi, ci;

		if (sscanf(word, "%*u:%u", &place.start) == 1)
			result = CALL(nvmlDeviceCreateGpuInstanceWithPlacement, (Device, uint, void *, Device *), device, profile, &place,
				      &gi);
		else
			result = CALL(nvmlDeviceCreateGpuInstance, (Device, uint, Device *), device, profile, &gi);
		if (result)
			break;
		CALL(nvmlGpuInstanceGetInfo, (Device, void *), gi, &info);
		printf("Successfully created GPU instance ID %2u on GPU %2s using profile ID %2u\n", info.id, gpu, profile);
		for (size_t i = 0; with_compute && i < sizeof(full_size) / sizeof(full_size[0]); i++)
			if (full_size[i][0] == profile)
				result = CALL(nvmlGpuInstanceCreateComputeInstance, (Device, uint, Device *), gi, full_size[i][1], &ci);
	}
	if (result)
		printf("Unable to create a GPU instance on GPU %s: %s\n", gpu, explain(result));
	free(copy);
	return result;
}

static int create_compute(const char *option, const char *value, Device device, const char *gpu)
{
	char *copy = strdup(value), *save = NULL;
	Device gi, ci;
	int result = CALL(nvmlDeviceGetGpuInstanceById, (Device, uint, Device *), device, only_instance, &gi);

	(void)option;
	for (char *word = strtok_r(copy, ",", &save); word && !result; word = strtok_r(NULL, ",", &save)) {
		result = CALL(nvmlGpuInstanceCreateComputeInstance, (Device, uint, Device *), gi, strtoul(word, NULL, 10), &ci);
		if (!result)
			printf("Successfully created compute instance on GPU %s GPU instance ID %d using profile ID %s\n", gpu,
			       only_instance, word);
	}
	if (result)
		printf("Unable to create a compute instance on GPU %s GPU instance ID %d: %s\n", gpu, only_instance, explain(result));
	free(copy);
	return result;
}

static int mig(int count, char **words)
{
	const char *profiles = NULL, *compute = NULL, *action = NULL;
	int with_compute = 0;

	for (int i = 2; i < count; i++) {
		if (!strcmp(words[i], "-i") && i + 1 < count)
			only = index_of(words[++i]);
		else if (!strcmp(words[i], "-cgi") && i + 1 < count)
			profiles = words[++i];
		else if (!strcmp(words[i], "-cci") && i + 1 < count)
			compute = words[++i];
		else if (!strcmp(words[i], "-gi") && i + 1 < count)
			only_instance = atoi(words[++i]);
		else if (!strcmp(words[i], "-C"))
			with_compute = 1;
		else
			action = words[i];
	}
	if (profiles)
		return each_gpu(create_instances, with_compute ? "-C" : "", profiles);
	if (compute && only_instance >= 0)
		return each_gpu(create_compute, "-cci", compute);
	if (action && strlen(action) == 4 && strstr("-lgi -lci -dgi -dci", action))
		return each_gpu(gpu_instances, action, NULL);
	puts("Invalid combination of input arguments. Please run 'nvidia-smi mig -h' for help.");
	return 2;
}

static int run(int count, char **words)
{
	static const char *const with_value[] = {"-pm", "-pl", "-c", "-e", "-mig", "-lgc", "-ac"};
	const char *format = "csv", *query = NULL, *option = NULL, *value = NULL;

	if (count > 1 && !strcmp(words[1], "mig"))
		return mig(count, words);
	for (int i = 1; i < count; i++) {
		char *word = words[i];
		int takes_value = 0;

		for (size_t j = 0; j < sizeof(with_value) / sizeof(with_value[0]); j++)
			takes_value |= !strcmp(word, with_value[j]);
		if (!strncmp(word, "--format=", 9)) {
			format = word + 9;
		} else if (!strcmp(word, "-i") && i + 1 < count) {
			only = index_of(words[++i]);
		} else if (!strcmp(word, "-L") || !strcmp(word, "--list-gpus")) {
			return list_gpus();
		} else if (!strncmp(word, "--query-gpu=", 12) || !strncmp(word, "--query-compute-apps=", 21)) {
			query = word;
		} else if (!strcmp(word, "-rgc") || !strcmp(word, "-rac")) {
			option = word;
		} else if (takes_value && i + 1 < count) {
			option = word;
			value = words[++i];
		} else {
			printf("Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n");
			return 2;
		}
	}
	if (option)
		return each_gpu(set_one, option, value);
	if (query)
		return strstr(query, "--query-gpu=") ? query_gpus(query, format) : query_processes(query, format);
	return table();
}

int main(int count, char **words)
{
	int result;

	library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
	if (!library) {
		puts("NVIDIA-SMI couldn't find libnvidia-ml.so library in your system. Please make sure that the NVIDIA Display "
		     "Driver is properly installed and present in your system.\nPlease also try adding directory that contains "
		     "libnvidia-ml.so to your system PATH.");
		return 12;
	}
	result = CALL(nvmlInit_v2, (void));
	if (result == 9) {
		puts("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA "
		     "driver is installed and running.\n");
		return result;
	}
	if (result) {
		printf("Failed to initialize NVML: %s\n", explain(result));
		return result;
	}
	result = run(count, words);
	CALL(nvmlShutdown, (void));
	return result;
}
