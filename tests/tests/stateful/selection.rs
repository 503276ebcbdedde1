//! Selection of servers and disturbances by environment variables.

use std::env;

/// Whether an environment variable, a list separated by commas, has this name. Without the variable, all names are selected.
///
/// # Panics
/// Panics if the list has a name that is not one of `known`.
pub(super) fn is_selected(variable: &str, known: &[String], name: &str) -> bool {
    let Ok(selected) = env::var(variable) else {
        return true;
    };
    for selected in selected.split(',') {
        assert!(
            known.iter().any(|known| known == selected),
            "{variable} has {selected:?}; expected some of {known:?}"
        );
    }
    selected.split(',').any(|selected| selected == name)
}
