// SPDX-License-Identifier: GPL-2.0
/*
 * Stand-in for nvidia.ko: what user space can see of it, without hardware.
 *
 * Parameters: gpus=N        how many GPUs it claims (default 2)
 *             gpu_name=TEXT their model
 *             serial=N      goes into the GPUs' UUIDs, so that two machines can have different ones (default 0)
 *             fail_load=1   loading fails, as after an initialisation error
 *             stuck=1       holds one reference to itself that no process explains; may be written while loaded
 */
#include <linux/ktime.h>
#include <linux/mm.h>
#include <linux/mutex.h>
#include <linux/proc_fs.h>
#include <linux/seq_file.h>

#include "standin.h"

static int gpus = 2;
module_param(gpus, int, 0444);
static char *gpu_name = "NVIDIA Stand-in GPU";
module_param(gpu_name, charp, 0444);
static int serial;
module_param(serial, int, 0444);
static bool fail_load;
module_param(fail_load, bool, 0444);

static DEFINE_MUTEX(stuck_lock);
static bool stuck;

static int stuck_set(const char *text, const struct kernel_param *kp)
{
	bool wanted;
	int error = kstrtobool(text, &wanted);

	if (error)
		return error;
	mutex_lock(&stuck_lock);
	if (wanted && !stuck)
		__module_get(THIS_MODULE);
	if (!wanted && stuck)
		module_put(THIS_MODULE);
	stuck = wanted;
	mutex_unlock(&stuck_lock);
	return 0;
}

static const struct kernel_param_ops stuck_ops = { .set = stuck_set, .get = param_get_bool };
module_param_cb(stuck, &stuck_ops, &stuck, 0644);

static struct cdev gpu_cdev, ctl_cdev;
static struct proc_dir_entry *proc_top;
static u64 load_id;

int nvidia_standin_register(const char *dependant)
{
	pr_debug("NVRM: %s registered\n", dependant);
	return 0;
}
EXPORT_SYMBOL_GPL(nvidia_standin_register);

int nvidia_p2p_get_pages(void)
{
	return -EINVAL;
}
EXPORT_SYMBOL_GPL(nvidia_p2p_get_pages);

int nvidia_p2p_put_pages(void)
{
	return -EINVAL;
}
EXPORT_SYMBOL_GPL(nvidia_p2p_put_pages);

static int nv_open(struct inode *inode, struct file *file)
{
	unsigned int minor = iminor(inode);

	return minor == NV_MINOR_CTL || minor < gpus ? 0 : -ENODEV;
}

static ssize_t nv_read(struct file *file, char __user *buffer, size_t size, loff_t *offset)
{
	return 0;
}

/* One zeroed page: enough for a holder that keeps only a mapping after closing the file. */
static int nv_mmap(struct file *file, struct vm_area_struct *vma)
{
	struct page *page = alloc_page(GFP_KERNEL | __GFP_ZERO);
	int error;

	if (!page)
		return -ENOMEM;
	error = vm_insert_page(vma, vma->vm_start, page);
	__free_page(page);
	return error;
}

static const struct file_operations nv_fops = {
	.owner = THIS_MODULE,
	.open = nv_open,
	.read = nv_read,
	.mmap = nv_mmap,
};

static int version_show(struct seq_file *out, void *unused)
{
	seq_puts(out, "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  " NV_VERSION "  Release Build  (standin)\n");
	seq_puts(out, "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14+deb12u1)\n");
	return 0;
}

static int params_show(struct seq_file *out, void *unused)
{
	seq_puts(out, "ResmanDebugLevel: 4294967295\nModifyDeviceFiles: 1\n");
	seq_puts(out, "DeviceFileUID: 0\nDeviceFileGID: 0\nDeviceFileMode: 438\n");
	return 0;
}

/* Not a file of NVIDIA's: lets the stand-in libraries see that the module was loaded anew. */
static int load_id_show(struct seq_file *out, void *unused)
{
	seq_printf(out, "%llu\n", load_id);
	return 0;
}

static int information_show(struct seq_file *out, void *unused)
{
	long gpu = (long)out->private;

	seq_printf(out, "Model: \t\t %s\n", gpu_name);
	seq_printf(out, "IRQ:   \t\t %ld\n", 64 + gpu);
	seq_printf(out, "GPU UUID: \t GPU-5ca1ab1e-%04x-4000-8000-%012ld\n", serial & 0xffff, gpu);
	seq_puts(out, "Video BIOS: \t 92.00.45.00.03\nBus Type: \t PCIe\nDMA Size: \t 47 bits\nDMA Mask: \t 0x7fffffffffff\n");
	seq_printf(out, "Bus Location: \t 0000:%02lx:00.0\n", gpu + 1);
	seq_printf(out, "Device Minor: \t %ld\n", gpu);
	seq_puts(out, "GPU Firmware: \t " NV_VERSION "\nGPU Excluded:\t No\n");
	return 0;
}

static void proc_make(void)
{
	struct proc_dir_entry *list, *one;
	char address[16];
	long gpu;

	proc_top = proc_mkdir("driver/nvidia", NULL);
	if (!proc_top)
		return;
	proc_create_single("version", 0444, proc_top, version_show);
	proc_create_single("params", 0444, proc_top, params_show);
	proc_create_single("standin_load_id", 0444, proc_top, load_id_show);
	list = proc_mkdir("gpus", proc_top);
	for (gpu = 0; list && gpu < gpus; gpu++) {
		snprintf(address, sizeof(address), "0000:%02lx:00.0", gpu + 1);
		one = proc_mkdir(address, list);
		if (one)
			proc_create_single_data("information", 0444, one, information_show, (void *)gpu);
	}
}

static int __init nv_init(void)
{
	int error;

	if (fail_load || NV_BROKEN) {
		pr_err("NVRM: GPU 0000:01:00.0: RmInitAdapter failed! (0x26:0x56:1482)\n");
		pr_err("NVRM: None of the NVIDIA devices were initialized.\n");
		return -ENODEV;
	}
	gpus = clamp(gpus, 0, NV_MAX_GPUS);
	load_id = ktime_get_real_ns();
	error = register_chrdev_region(MKDEV(NV_MAJOR, 0), NV_MINOR_MODESET, NV_REGION("nvidia"));
	if (error)
		return error;
	error = register_chrdev_region(MKDEV(NV_MAJOR, NV_MINOR_CTL), 1, NV_REGION("nvidiactl"));
	if (error)
		goto no_ctl;
	error = standin_cdev_add(&gpu_cdev, &nv_fops, MKDEV(NV_MAJOR, 0), NV_MINOR_MODESET);
	if (error)
		goto no_gpu_cdev;
	error = standin_cdev_add(&ctl_cdev, &nv_fops, MKDEV(NV_MAJOR, NV_MINOR_CTL), 1);
	if (error)
		goto no_ctl_cdev;
	proc_make();
	pr_info("NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  " NV_VERSION "  Release Build  (standin)\n");
	return 0;

no_ctl_cdev:
	cdev_del(&gpu_cdev);
no_gpu_cdev:
	unregister_chrdev_region(MKDEV(NV_MAJOR, NV_MINOR_CTL), 1);
no_ctl:
	unregister_chrdev_region(MKDEV(NV_MAJOR, 0), NV_MINOR_MODESET);
	return error;
}

static void __exit nv_exit(void)
{
	proc_remove(proc_top);
	cdev_del(&ctl_cdev);
	cdev_del(&gpu_cdev);
	unregister_chrdev_region(MKDEV(NV_MAJOR, NV_MINOR_CTL), 1);
	unregister_chrdev_region(MKDEV(NV_MAJOR, 0), NV_MINOR_MODESET);
}

module_init(nv_init);
module_exit(nv_exit);
MODULE_LICENSE("GPL");
MODULE_VERSION(NV_VERSION);
MODULE_DESCRIPTION("stand-in for nvidia.ko, for tests of driver upgrades");
#if NV_BROKEN
/* For the container lab, which reads the module file instead of running it. */
MODULE_INFO(standin_init, "-ENODEV");
#endif
