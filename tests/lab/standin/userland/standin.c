/* SPDX-License-Identifier: GPL-3.0-or-later */
#define _GNU_SOURCE
#include "standin.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

static const char *path(char out[512], const char *absolute)
{
	const char *root = getenv("NVIDIA_STANDIN_ROOT");

	snprintf(out, 512, "%s%s", root ? root : "", absolute);
	return out;
}

static FILE *open_text(const char *absolute)
{
	char name[512];

	return fopen(path(name, absolute), "re");
}

int standin_loaded_version(char *out, size_t size)
{
	FILE *file = open_text("/proc/driver/nvidia/version");
	char line[512] = "";
	int result = -1;

	if (!file)
		return -1;
	if (fgets(line, sizeof(line), file)) {
		for (char *word = strtok(line, " \t\n"); word; word = strtok(NULL, " \t\n")) {
			if (isdigit((unsigned char)word[0]) && strchr(word, '.') && strlen(word) < size) {
				strcpy(out, word);
				result = 0;
				break;
			}
		}
	}
	fclose(file);
	return result;
}

static void read_information(struct standin_gpu *gpu)
{
	char name[128], line[256];
	FILE *file;

	snprintf(name, sizeof(name), "/proc/driver/nvidia/gpus/%s/information", gpu->address);
	file = open_text(name);
	while (file && fgets(line, sizeof(line), file)) {
		char *value = strchr(line, ':');

		if (!value)
			continue;
		*value++ = 0;
		value += strspn(value, " \t");
		value[strcspn(value, "\n")] = 0;
		if (!strcmp(line, "Model"))
			snprintf(gpu->model, sizeof(gpu->model), "%.63s", value);
		else if (!strcmp(line, "GPU UUID"))
			snprintf(gpu->uuid, sizeof(gpu->uuid), "%.63s", value);
		else if (!strcmp(line, "Device Minor"))
			gpu->minor = atoi(value);
	}
	if (file)
		fclose(file);
}

static int by_address(const void *a, const void *b)
{
	return strcmp(((const struct standin_gpu *)a)->address, ((const struct standin_gpu *)b)->address);
}

int standin_gpus(struct standin_gpu gpus[STANDIN_MAX_GPUS])
{
	char name[512];
	DIR *list = opendir(path(name, "/proc/driver/nvidia/gpus"));
	struct dirent *entry;
	int count = 0;

	while (list && count < STANDIN_MAX_GPUS && (entry = readdir(list))) {
		if (entry->d_name[0] == '.')
			continue;
		memset(&gpus[count], 0, sizeof(gpus[count]));
		snprintf(gpus[count].address, sizeof(gpus[count].address), "%.31s", entry->d_name);
		read_information(&gpus[count]);
		count++;
	}
	if (list)
		closedir(list);
	qsort(gpus, count, sizeof(gpus[0]), by_address);
	return count;
}

/* --- state -------------------------------------------------------------------------------------------------------- */

static const char *const layers[] = {
	"/run/nvidia-standin/loaded",
	"/var/lib/nvidia-standin/inforom",
	"/run/nvidia-standin/state",
	"/etc/nvidia-standin/state",
};

static int find(FILE *file, const char *key, char *out, size_t size)
{
	char line[1024];
	size_t length = strlen(key);
	int result = -1;

	rewind(file);
	while (fgets(line, sizeof(line), file)) {
		if (strncmp(line, key, length) || line[length] != '=')
			continue;
		line[strcspn(line, "\n")] = 0;
		snprintf(out, size, "%s", line + length + 1);
		result = 0; /* the last line of a file wins, so a test may simply append */
	}
	return result;
}

static int find_layer(int layer, const char *key, int gpu, char *out, size_t size)
{
	FILE *file = open_text(layers[layer]);
	char indexed[160];
	int result = -1;

	if (!file)
		return -1;
	if (gpu >= 0) {
		snprintf(indexed, sizeof(indexed), "%s.%d", key, gpu);
		result = find(file, indexed, out, size);
	}
	if (result)
		result = find(file, key, out, size);
	fclose(file);
	return result;
}

/* Identity of this load of the module: its own counter, or, where a lab only shows files, the version file's change. */
static void load_identity(char *out, size_t size)
{
	FILE *file = open_text("/proc/driver/nvidia/standin_load_id");
	char name[512];
	struct stat found;

	snprintf(out, size, "none");
	if (file) {
		if (fgets(out, size, file))
			out[strcspn(out, "\n")] = 0;
		fclose(file);
	} else if (!stat(path(name, "/proc/driver/nvidia/version"), &found)) {
		snprintf(out, size, "%lu.%ld.%ld", (unsigned long)found.st_ino, (long)found.st_mtim.tv_sec,
			 found.st_mtim.tv_nsec);
	}
}

static void make_parents(char *file)
{
	for (char *slash = strchr(file + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
		*slash = 0;
		mkdir(file, 0755);
		*slash = '/';
	}
}

/* Write the file anew: with a header and nothing else, or as it was without the key `drop` and with the line `add`. */
static int rewrite(const char *name, const char *header, const char *drop, const char *add)
{
	char temporary[600], line[1024];
	FILE *in = NULL, *out;
	size_t length = drop ? strlen(drop) : 0;

	snprintf(temporary, sizeof(temporary), "%s.new", name);
	out = fopen(temporary, "we");
	if (!out)
		return -1;
	if (header)
		fprintf(out, "%s\n", header);
	else
		in = fopen(name, "re");
	while (in && fgets(line, sizeof(line), in))
		if (!drop || strncmp(line, drop, length) || line[length] != '=')
			fputs(line, out);
	if (in)
		fclose(in);
	if (add)
		fprintf(out, "%s\n", add);
	if (fclose(out))
		return -1;
	return rename(temporary, name);
}

static int lock(void)
{
	char name[512];
	int fd;

	path(name, "/run/nvidia-standin/lock");
	make_parents(name);
	fd = open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
	if (fd >= 0)
		flock(fd, LOCK_EX);
	return fd;
}

static int keep_unlocked(enum standin_layer layer, const char *key, int gpu, const char *value)
{
	char name[512], indexed[160], line[1024];

	path(name, layers[layer]);
	make_parents(name);
	if (gpu >= 0)
		snprintf(indexed, sizeof(indexed), "%s.%d", key, gpu);
	else
		snprintf(indexed, sizeof(indexed), "%s", key);
	snprintf(line, sizeof(line), "%s=%s", indexed, value ? value : "");
	return rewrite(name, NULL, indexed, value ? line : NULL);
}

/* After a load of the module: forget what was set before, and let pending InfoROM settings become current. */
static void refresh(void)
{
	char identity[96], known[96] = "", header[128], name[512];
	int fd;

	load_identity(identity, sizeof(identity));
	find_layer(LOADED, "load_id", -1, known, sizeof(known));
	if (!strcmp(identity, known) || !strcmp(identity, "none"))
		return;
	fd = lock();
	snprintf(header, sizeof(header), "load_id=%s", identity);
	if (fd < 0 || rewrite(path(name, layers[LOADED]), header, NULL, NULL)) {
		if (fd >= 0)
			close(fd);
		return; /* not root: read what there is */
	}
	for (int gpu = 0; gpu < STANDIN_MAX_GPUS; gpu++) {
		char value[64];

		if (!find_layer(INFOROM, "ecc_pending", gpu, value, sizeof(value)))
			keep_unlocked(LOADED, "ecc", gpu, value);
		if (standin_number("mig_persists", gpu, 1) && !find_layer(INFOROM, "mig_pending", gpu, value, sizeof(value)))
			keep_unlocked(LOADED, "mig", gpu, value);
	}
	close(fd);
}

int standin_text(const char *key, int gpu, char *out, size_t size)
{
	static int refreshing;

	if (!refreshing) {
		refreshing = 1;
		refresh();
		refreshing = 0;
	}
	for (size_t layer = 0; layer < sizeof(layers) / sizeof(layers[0]); layer++)
		if (!find_layer(layer, key, gpu, out, size))
			return 0;
	return -1;
}

long standin_number(const char *key, int gpu, long otherwise)
{
	char value[256];

	return standin_text(key, gpu, value, sizeof(value)) ? otherwise : strtol(value, NULL, 0);
}

int standin_keep(enum standin_layer layer, const char *key, int gpu, const char *value)
{
	int fd, result;

	refresh();
	fd = lock();
	if (fd < 0)
		return -1;
	result = keep_unlocked(layer, key, gpu, value);
	close(fd);
	return result;
}

int standin_keep_number(enum standin_layer layer, const char *key, int gpu, long value)
{
	char text[32];

	snprintf(text, sizeof(text), "%ld", value);
	return standin_keep(layer, key, gpu, text);
}

/* --- MIG devices -------------------------------------------------------------------------------------------------- */

void standin_mig_uuid(int gpu, int gi, int ci, char out[64])
{
	snprintf(out, 64, "MIG-5ca1ab1e-%04d-4000-8000-%06d%06d", gpu, gi, ci);
}

/* nvml.c says how the layout is written: ci.<gpu>=<gi id>:<id>:<profile id>:<start>[,...] */
int standin_mig_devices(int gpu, struct standin_mig out[STANDIN_MAX_MIG])
{
	char text[900];
	int count = 0;

	if (standin_number("mig", gpu, 0) <= 0 || standin_text("ci", gpu, text, sizeof(text)))
		return 0;
	for (char *word = strtok(text, ","); word && count < STANDIN_MAX_MIG; word = strtok(NULL, ",")) {
		struct standin_mig *mig = &out[count];

		if (sscanf(word, "%d:%d", &mig->gi, &mig->ci) != 2)
			continue;
		standin_mig_uuid(gpu, mig->gi, mig->ci, mig->uuid);
		count++;
	}
	return count;
}

/* --- nodes and processes ------------------------------------------------------------------------------------------ */

static void nvidia_modprobe(char *const arguments[])
{
	pid_t child;
	int status;

	if (!posix_spawnp(&child, "nvidia-modprobe", NULL, NULL, arguments, environ))
		waitpid(child, &status, 0);
}

void standin_autoload(void)
{
	char version[80];

	if (standin_loaded_version(version, sizeof(version)) && standin_number("autoload", -1, 0))
		nvidia_modprobe((char *[]){"nvidia-modprobe", "-c", "0", NULL});
}

int standin_open(const char *name)
{
	char node[512], absolute[64];
	int fd;

	snprintf(absolute, sizeof(absolute), "/dev/%.50s", name);
	path(node, absolute);
	fd = open(node, O_RDWR | O_CLOEXEC);
	if (fd < 0 && errno == ENOENT && !getenv("NVIDIA_STANDIN_ROOT")) {
		nvidia_modprobe((char *[]){"nvidia-modprobe", "-c", "0", "-u", NULL});
		fd = open(node, O_RDWR | O_CLOEXEC);
	}
	return fd;
}

/* The driver's own daemons hold the nodes without a compute context, so NVML does not list them. */
static int is_daemon(const char *pid)
{
	char name[64], comm[32] = "";
	FILE *file;

	snprintf(name, sizeof(name), "/proc/%.20s/comm", pid);
	file = fopen(name, "re");
	if (file) {
		if (!fgets(comm, sizeof(comm), file))
			comm[0] = 0;
		fclose(file);
	}
	return !strncmp(comm, "nvidia-persiste", 15) || !strncmp(comm, "nv-fabricmanage", 15);
}

static int holds(const char *pid, const char *node)
{
	char folder[64], link[400], target[512];
	struct dirent *entry;
	DIR *list;
	int found = 0;

	snprintf(folder, sizeof(folder), "/proc/%.20s/fd", pid);
	list = opendir(folder);
	while (list && !found && (entry = readdir(list))) {
		ssize_t length;

		snprintf(link, sizeof(link), "%s/%s", folder, entry->d_name);
		length = readlink(link, target, sizeof(target) - 1);
		if (length > 0) {
			target[length] = 0;
			found = !strcmp(target, node);
		}
	}
	if (list)
		closedir(list);
	return found;
}

int standin_holders(int minor, unsigned int *pids, int max)
{
	char absolute[32], node[512];
	struct dirent *entry;
	DIR *list = opendir("/proc");
	int count = 0;

	snprintf(absolute, sizeof(absolute), "/dev/nvidia%d", minor);
	path(node, absolute);
	while (list && (entry = readdir(list))) {
		if (!isdigit((unsigned char)entry->d_name[0]) || atoi(entry->d_name) == getpid())
			continue;
		if (!holds(entry->d_name, node) || is_daemon(entry->d_name))
			continue;
		if (count < max)
			pids[count] = atoi(entry->d_name);
		count++;
	}
	if (list)
		closedir(list);
	return count;
}

int standin_fault(const char *library, const char *function, int gpu)
{
	char key[128];

	snprintf(key, sizeof(key), "%s_hang.%s", library, function);
	while (standin_number(key, gpu, 0))
		sleep(1);
	snprintf(key, sizeof(key), "%s_error.%s", library, function);
	return standin_number(key, gpu, 0);
}
