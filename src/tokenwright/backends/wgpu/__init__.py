"""The backend for any GPU: WGSL kernels through wgpu (Vulkan, Metal, DirectX 12). No other folder imports wgpu."""
