//! Log lines about changes of endpoints. The debug lines have the messages of Linkerd's controller, which operators search for.
//!
//! Lines are collected while the state is locked, and written after the lock is released: a slow reader of the log must not delay
//! streams.

use std::sync::Arc;

use tracing::{debug, error};
use tulle_core::names::label;

use crate::cluster::store::objects::Store;
use crate::resources::event::Event;
use crate::resources::meta::NamespacedName;
use crate::resources::service::EndpointSlice;
use crate::resources::{Kind, Object};

pub(super) enum LogLine {
    SliceWithoutService { slice: NamespacedName },
    Change(Change),
}

/// A change of an EndpointSlice or of a Service.
pub(super) struct Change {
    namespace: Arc<str>,
    /// Empty if the EndpointSlice names no Service.
    service: Arc<str>,
    message: String,
}

/// Adds the log lines of an event to `lines`. Must be called before the event is applied to the store.
pub(super) fn collect(store: &Store, event: &Event, lines: &mut Vec<LogLine>) {
    if let Event::Applied(Object::EndpointSlice(slice)) = event
        && slice.service.is_none()
    {
        let slice = slice.meta.name.clone();
        lines.push(LogLine::SliceWithoutService { slice });
    }
    if tracing::enabled!(tracing::Level::DEBUG) {
        lines.extend(change(store, event).map(LogLine::Change));
    }
}

fn change(store: &Store, event: &Event) -> Option<Change> {
    let (name, service, message) = match event {
        Event::Applied(Object::EndpointSlice(slice)) => {
            let name = &slice.meta.name;
            let verb = match store.object(Kind::EndpointSlice, name) {
                Some(_) => "Updating",
                None => "Adding",
            };
            (name, service_name(slice), format!("{verb} ES {name}"))
        }
        Event::Applied(Object::Service(service)) => {
            let name = &service.meta.name;
            let message = format!("Updating service for {name}");
            (name, Some(name.name.clone()), message)
        }
        Event::Deleted(Kind::EndpointSlice, name) => {
            let service = match store.object(Kind::EndpointSlice, name) {
                Some(Object::EndpointSlice(slice)) => service_name(slice),
                _ => None,
            };
            (name, service, format!("Deleting ES {name}"))
        }
        Event::Applied(_) | Event::Deleted(..) | Event::Unreadable(_) | Event::Synced => return None,
    };
    Some(Change {
        namespace: name.namespace.clone(),
        service: service.unwrap_or_default(),
        message,
    })
}

fn service_name(slice: &EndpointSlice) -> Option<Arc<str>> {
    slice.service.as_ref().map(|service| service.name.clone())
}

impl LogLine {
    /// Writes the line; `addr` is the address of the destination service.
    pub(super) fn write(&self, addr: &str) {
        let component = "service-publisher";
        match self {
            Self::SliceWithoutService { slice } => {
                let label = label::SERVICE_NAME;
                error!(
                    addr,
                    component,
                    %slice,
                    "an EndpointSlice names no Service: it needs the label {label}, or a Service as its only owner"
                );
            }
            Self::Change(Change {
                namespace,
                service,
                message,
            }) => debug!(addr, component, ns = %namespace, svc = %service, "{message}"),
        }
    }
}
