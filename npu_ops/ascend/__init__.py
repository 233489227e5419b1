"""Every op mapped onto torch_npu. Imported only where an NPU tensor asks for it."""
