/* SPDX-License-Identifier: GPL-2.0 */
/* What the stand-in modules share: the driver's device numbers and the symbols they take from each other. */
#ifndef STANDIN_H
#define STANDIN_H

#include <linux/cdev.h>
#include <linux/fs.h>
#include <linux/module.h>

#define NV_MAJOR 195
#define NV_MINOR_MODESET 254
#define NV_MINOR_CTL 255
#define NV_MAX_GPUS 8

/* /proc/devices shows one old name up to branch 535 and one name a region from 545 on. */
#if NV_BRANCH < 545
#define NV_REGION(name) "nvidia-frontend"
#else
#define NV_REGION(name) name
#endif

/* Exported by nvidia; the second pair is what peer-memory modules such as gdrdrv link to. */
int nvidia_standin_register(const char *dependant);
int nvidia_p2p_get_pages(void);
int nvidia_p2p_put_pages(void);
/* Exported by nvidia-modeset. */
int nvkms_standin_register(void);

/* A character device that may be opened and does nothing. Both owners are set, so an open takes two references. */
static inline int standin_cdev_add(struct cdev *cdev, const struct file_operations *fops, dev_t first,
				   unsigned int count)
{
	cdev_init(cdev, fops);
	cdev->owner = THIS_MODULE;
	return cdev_add(cdev, first, count);
}

#endif
