/* SPDX-License-Identifier: GPL-3.0-or-later */
/*
 * Stand-in for the two daemons that keep the driver in use on a server:
 *   nvidia-persistenced  holds /dev/nvidiactl and every GPU, switches persistence mode on
 *   nv-fabricmanager     (-DFABRIC) the same hold, and reports the fabric as completed
 * Both leave with status 1 when their version is not the loaded driver's, as NVIDIA's do.
 */
#include "standin.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <syslog.h>
#include <unistd.h>

#ifdef FABRIC
#define NAME "nv-fabricmanager"
#define RUN_DIRECTORY "/run/nvidia-fabricmanager"
#else
#define NAME "nvidia-persistenced"
#define RUN_DIRECTORY "/run/nvidia-persistenced"
#endif

static const char pid_file[] = RUN_DIRECTORY "/" NAME ".pid";
static volatile sig_atomic_t finished;

static void finish(int number)
{
	(void)number;
	finished = 1;
}

static void fail(const char *format, const char *a, const char *b)
{
	char text[512];

	snprintf(text, sizeof(text), format, a, b);
	fprintf(stderr, NAME ": %s\n", text);
	syslog(LOG_ERR, "%s", text);
	exit(1);
}

static int listen_on(const char *name)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	snprintf(address.sun_path, sizeof(address.sun_path), "%s", name);
	unlink(name);
	if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof(address)) || listen(fd, 4))
		return -1;
	return fd;
}

/* The parent leaves once the child holds the GPUs, which is what systemd's Type=forking waits for. */
static void to_background(void)
{
	FILE *file;
	pid_t child = fork();

	if (child < 0)
		fail("fork: %s%s", strerror(errno), "");
	if (child > 0) {
		file = fopen(pid_file, "we");
		if (!file || fprintf(file, "%d\n", child) < 0 || fclose(file))
			fail("%s: %s", pid_file, strerror(errno));
		_exit(0);
	}
	setsid();
}

int main(void)
{
	struct standin_gpu gpus[STANDIN_MAX_GPUS];
	char version[80], node[32];
	struct sigaction action = {.sa_handler = finish};
	sigset_t held;
	int count;

	openlog(NAME, LOG_PID, LOG_DAEMON);
	if (standin_loaded_version(version, sizeof(version)) || access("/dev/nvidiactl", F_OK)) {
		/* NVIDIA's daemon loads the driver and makes the nodes too */
		if (system("nvidia-modprobe -c 0") || standin_loaded_version(version, sizeof(version)))
			fail("Failed to query NVIDIA devices. Please ensure that the NVIDIA device files (/dev/nvidia*) exist%s%s",
			     "", "");
	}
	if (strcmp(version, STANDIN_VERSION))
#ifdef FABRIC
		fail("fabric manager NVIDIA GPU driver interface version %s don't match with driver version %s. Please update "
		     "with matching NVIDIA driver package.",
		     STANDIN_VERSION, version);
#else
		fail("Failed to initialize: version %s does not match the loaded driver %s", STANDIN_VERSION, version);
#endif
	if (mkdir(RUN_DIRECTORY, 0755) && errno != EEXIST)
		fail("%s: %s", RUN_DIRECTORY, strerror(errno));
	sigemptyset(&held);
	sigaddset(&held, SIGTERM);
	sigaddset(&held, SIGINT);
	sigprocmask(SIG_BLOCK, &held, NULL);
	sigaction(SIGTERM, &action, NULL);
	sigaction(SIGINT, &action, NULL);

	if (standin_open("nvidiactl") < 0)
		fail("/dev/nvidiactl: %s%s", strerror(errno), "");
	count = standin_gpus(gpus);
	for (int gpu = 0; gpu < count; gpu++) {
		snprintf(node, sizeof(node), "nvidia%d", gpus[gpu].minor);
		if (standin_open(node) < 0)
			fail("/dev/%s: %s", node, strerror(errno));
#ifdef FABRIC
		standin_keep_number(LOADED, "fabric_state", gpu, 3);
#else
		standin_keep_number(LOADED, "persistence", gpu, 1);
#endif
	}
	if (listen_on(RUN_DIRECTORY "/socket") < 0)
		fail("%s: %s", RUN_DIRECTORY "/socket", strerror(errno));
	to_background();
	syslog(LOG_NOTICE, "Started (%d)", getpid());
	sigemptyset(&held);
	while (!finished)
		sigsuspend(&held);
#ifndef FABRIC
	for (int gpu = 0; gpu < count; gpu++)
		standin_keep_number(LOADED, "persistence", gpu, 0);
#endif
	unlink(pid_file);
	unlink(RUN_DIRECTORY "/socket");
	syslog(LOG_NOTICE, "Shutdown (%d)", getpid());
	return 0;
}
