//! Where operations run. Today the CPU; Vulkan and HIP join behind the same checked operations.

pub mod cpu;
