//! Embeds the files of `charts/` in the binary, so that `tulle install` and Helm render the same charts.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

fn main() -> io::Result<()> {
    let charts = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default()).join("../charts");
    println!("cargo::rerun-if-changed={}", charts.display());
    let mut files = Vec::new();
    for chart in ["tulle-crds", "tulle-control-plane", "tulle-multicluster"] {
        collect_files(&charts.join(chart), &mut files)?;
    }
    files.sort();
    let mut table = String::from("[\n");
    for file in files {
        let name = file.strip_prefix(&charts).map_err(io::Error::other)?;
        let _ = writeln!(table, "    ({name:?}, include_str!({:?})),", file.canonicalize()?);
    }
    table.push_str("]\n");
    fs::write(
        PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default()).join("charts.rs"),
        table,
    )
}

fn collect_files(dir: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        match entry.file_type()?.is_dir() {
            true => collect_files(&entry.path(), files)?,
            false => files.push(entry.path()),
        }
    }
    Ok(())
}
