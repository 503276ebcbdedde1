//! The manifests that the demo's control plane reads: built-in ones, or a directory of the user.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, ensure};

/// The files of `demo/` in the repository, with their names.
pub(super) fn shipped() -> impl Iterator<Item = (&'static str, &'static str)> {
    SHIPPED.into_iter()
}

/// Writes the built-in files into an existing directory.
pub(super) fn write(dir: &Path) -> anyhow::Result<()> {
    for (name, text) in shipped() {
        let path = dir.join(name);
        fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

/// Reads all YAML files of a directory, ordered by name.
pub(super) fn read(dir: &Path) -> anyhow::Result<Vec<(String, String)>> {
    let context = || format!("reading the manifests in {}", dir.display());
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).with_context(context)? {
        let path = entry.with_context(context)?.path();
        if !path.extension().is_some_and(|ext| ext == "yaml" || ext == "yml") {
            continue;
        }
        let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        files.push((path.display().to_string(), text));
    }
    ensure!(!files.is_empty(), "{} contains no .yaml file", dir.display());
    files.sort();
    Ok(files)
}

const SHIPPED: [(&str, &str); 3] = [
    ("policy.yaml", include_str!("../../../demo/policy.yaml")),
    ("services.yaml", include_str!("../../../demo/services.yaml")),
    ("workloads.yaml", include_str!("../../../demo/workloads.yaml")),
];
