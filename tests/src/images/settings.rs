use std::collections::BTreeMap;

/// The settings of an image besides its files.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct Settings {
    pub(super) entrypoint: Vec<String>,
    pub(super) env: Vec<String>,
    pub(super) user: String,
    pub(super) labels: BTreeMap<String, String>,
}
