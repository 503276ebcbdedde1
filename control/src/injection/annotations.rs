//! The annotations of an object of the API.

use std::collections::BTreeMap;

pub type Annotations = BTreeMap<String, String>;
