//! The harness of the whole-mesh tests: a control plane, proxies and applications in one process.

pub mod apps;
pub mod client;
pub mod control;
pub mod eventually;
pub mod load;
pub mod mesh;
