//! Where events come from.
//!
//! A source reads objects, reports them as events into a [`Writer`](crate::resources::event::Writer), and says when it
//! has reported everything there was. What becomes of them is not its concern.

mod completion;
pub mod dir;
mod directory;
pub mod kubernetes;
mod manifest;
mod slices;
