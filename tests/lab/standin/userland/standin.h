/* SPDX-License-Identifier: GPL-3.0-or-later */
/*
 * What the stand-in libraries and tools know in common: where the driver shows itself, and where the lab keeps state.
 *
 * Truth from the kernel:  /proc/driver/nvidia/{version,gpus/<address>/information}, /proc/devices, /dev/nvidia*
 * State, one "key=value" or "key.<gpu>=value" a line, the first layer that has the key wins:
 *   LOADED  /run/nvidia-standin/loaded        what was set through NVML since the module was loaded; lost on reload
 *   INFOROM /var/lib/nvidia-standin/inforom   what a real GPU keeps in its InfoROM; survives reload and reboot
 *   KNOBS   /run/nvidia-standin/state         written by tests; gone after a reboot
 *           /etc/nvidia-standin/state         the same, kept over a reboot
 * The environment variable NVIDIA_STANDIN_ROOT is put before every one of these paths (for tests without the module).
 */
#ifndef STANDIN_H
#define STANDIN_H

#include <stddef.h>

#ifndef STANDIN_VERSION
#error "compile with -DSTANDIN_VERSION=\"...\""
#endif

#define STANDIN_MAX_GPUS 8
#define STANDIN_MAX_MIG 8

enum standin_layer { LOADED, INFOROM };

struct standin_gpu {
	char address[32];  /* 0000:01:00.0 */
	char uuid[64];     /* GPU-... */
	char model[64];
	int minor;
};

/* Version of the loaded kernel module into out; 0, or -1 where none is loaded. */
int standin_loaded_version(char *out, size_t size);
/* GPUs of the loaded module in bus order; returns how many (0 where none is loaded). */
int standin_gpus(struct standin_gpu gpus[STANDIN_MAX_GPUS]);

/* Value of "key.<gpu>" or else "key" (gpu < 0: only "key"); returns 0, or -1 where no layer has it. */
int standin_text(const char *key, int gpu, char *out, size_t size);
long standin_number(const char *key, int gpu, long otherwise);
/* Set "key.<gpu>" in a layer; value NULL removes it. Returns 0 or -1 with errno. */
int standin_keep(enum standin_layer layer, const char *key, int gpu, const char *value);
int standin_keep_number(enum standin_layer layer, const char *key, int gpu, long value);

/* A MIG device: compute instance ci of GPU instance gi. Its UUID is made of the GPU's number and of where it sits, so
 * the same layout has the same names again. */
struct standin_mig {
	int gi, ci;
	char uuid[64];
};

/* MIG devices of a GPU, in order of making; returns how many (0 where MIG is off). */
int standin_mig_devices(int gpu, struct standin_mig out[STANDIN_MAX_MIG]);
void standin_mig_uuid(int gpu, int gi, int ci, char out[64]);

/* Open a node by name ("nvidiactl", "nvidia0"), asking nvidia-modprobe to make it where it is missing; fd or -1. */
int standin_open(const char *name);
/* Load the module through nvidia-modprobe where the knob autoload=1 asks for it, as the real libraries do. */
void standin_autoload(void);
/* PIDs of other processes that have /dev/nvidia<minor> open; at most max are stored, all are counted. */
int standin_holders(int minor, unsigned int *pids, int max);

/* Never returns where the knob "<library>_hang.<function>[.<gpu>]" is set; value of "<library>_error.<...>" or 0. */
int standin_fault(const char *library, const char *function, int gpu);

#endif
