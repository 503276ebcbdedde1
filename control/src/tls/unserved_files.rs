//! Counts invalid files in the metric `unserved_configuration`, with the kind `File` and the path as the name.

use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use tulle_core::metrics::{Family, Gauge, Labels, Registry};

use crate::resources::unserved;

/// The invalid files of one reader. Their last valid versions, if there are any, stay in force.
pub(crate) struct UnservedFiles {
    family: Family<Gauge>,
    /// What the files contain, such as `certificate`: the label `field`.
    content: &'static str,
    counted: Mutex<Vec<Arc<Gauge>>>,
}

impl UnservedFiles {
    pub(crate) fn new(registry: &Registry, content: &'static str) -> Self {
        Self {
            family: unserved::metric_family(registry),
            content,
            counted: Mutex::default(),
        }
    }

    /// Replaces the files that are counted.
    pub(crate) fn set<'a>(&self, files: impl IntoIterator<Item = &'a Path>) {
        let gauge = |file: &Path| {
            let labels = Labels::new()
                .with("kind", "File")
                .with("namespace", "")
                .with("name", file.display())
                .with("field", self.content);
            let gauge = self.family.get(&labels);
            gauge.add(1);
            gauge
        };
        let counted = files.into_iter().map(gauge).collect();
        for gauge in std::mem::replace(&mut *self.counted.lock(), counted) {
            gauge.add(-1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_counted_until_they_are_valid() {
        let registry = Registry::new();
        let unserved = UnservedFiles::new(&registry, "certificate");
        let counted = || {
            let page = registry.render();
            let lines = page.lines().filter(|line| line.ends_with("} 1"));
            lines.map(str::to_owned).collect::<Vec<_>>()
        };
        let line = |name: &str| {
            format!("unserved_configuration{{kind=\"File\",namespace=\"\",name=\"{name}\",field=\"certificate\"}} 1")
        };
        unserved.set([Path::new("/a"), Path::new("/b")]);
        assert_eq!(counted(), [line("/a"), line("/b")]);
        unserved.set([Path::new("/b")]);
        assert_eq!(counted(), [line("/b")]);
        unserved.set([]);
        assert_eq!(counted(), [""; 0]);
    }
}
