//! Whole meshes in this process: what an application, an operator and a peer see.
//!
//! One program, because each would link everything anew.

mod transparency;
