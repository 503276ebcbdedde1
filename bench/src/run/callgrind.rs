//! Counts the instructions and allocations of a process between two points in time with callgrind, by function and by source file.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};

use super::setup::Side;
use super::testbed::Testbed;

/// Arguments that run a program under callgrind, with its dump files at `out`.
pub(super) fn arguments(out: &Path) -> [String; 4] {
    [
        "--tool=callgrind".to_owned(),
        // By default, valgrind creates its pipes in a directory that the proxy's user cannot write to.
        format!("--vgdb-prefix={}-vgdb", out.display()),
        format!("--callgrind-out-file={}", out.display()),
        "--dump-line=no".to_owned(),
    ]
}

/// Counts between two dumps.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Counts {
    /// Instructions by function, without its callees.
    pub(super) functions: BTreeMap<String, u64>,
    /// Instructions by source file, including inlined code. Empty if the binary has no line tables.
    pub(super) files: BTreeMap<String, u64>,
    /// Allocations by calling function.
    pub(super) allocations: BTreeMap<String, u64>,
}

/// Makes the process write its counts since the last dump, resets them to zero, and reads the dump.
///
/// `control` runs `callgrind_control`. It must have the same user and environment as the process, because it finds the process by
/// them.
pub(super) fn dump(mut control: Command, pid: u32, out: &Path, number: u32) -> anyhow::Result<Counts> {
    control
        .arg(format!("--vgdb-prefix={}-vgdb", out.display()))
        .args(["-d", &pid.to_string()]);
    let output = control.output().context("starting callgrind_control")?;
    ensure!(
        output.status.success(),
        "callgrind_control ended with {}: {}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    let path = PathBuf::from(format!("{}.{number}", out.display()));
    let text = std::fs::read_to_string(&path).with_context(|| {
        format!(
            "reading {}; callgrind_control printed {:?}",
            path.display(),
            String::from_utf8_lossy(&output.stdout)
        )
    })?;
    Ok(parse(&text))
}

/// Parses a dump. The format is in the valgrind manual, "Callgrind Format Specification".
fn parse(text: &str) -> Counts {
    let mut names: HashMap<&str, String> = HashMap::new();
    let mut paths: HashMap<&str, String> = HashMap::new();
    let mut counts = Counts::default();
    let mut function = String::new();
    let mut callee = String::new();
    let mut file = String::new();
    let mut is_call = false;
    for line in text.lines() {
        if let Some(path) = ["fl=", "fi=", "fe="].iter().find_map(|start| line.strip_prefix(start)) {
            file = resolve_name(&mut paths, path);
        } else if let Some(path) = ["cfi=", "cfl="].iter().find_map(|start| line.strip_prefix(start)) {
            resolve_name(&mut paths, path); // the line can define a number that later lines refer to
        } else if let Some(name) = line.strip_prefix("fn=") {
            function = resolve_name(&mut names, name);
        } else if let Some(name) = line.strip_prefix("cfn=") {
            callee = resolve_name(&mut names, name);
        } else if let Some(calls) = line.strip_prefix("calls=") {
            is_call = true;
            if ALLOCATORS.contains(&callee.as_str()) && !ALLOCATORS.contains(&function.as_str()) {
                let calls = calls.split_whitespace().next().and_then(|calls| calls.parse().ok());
                *counts.allocations.entry(function.clone()).or_default() += calls.unwrap_or(0_u64);
            }
        } else if line.starts_with(|first: char| first.is_ascii_digit() || "+-*".contains(first)) {
            // The line after "calls=" is the inclusive cost of the callee, which is counted at the callee.
            if !std::mem::take(&mut is_call) {
                let cost = line.split_whitespace().nth(1).and_then(|cost| cost.parse().ok());
                *counts.functions.entry(function.clone()).or_default() += cost.unwrap_or(0_u64);
                *counts.files.entry(file.clone()).or_default() += cost.unwrap_or(0_u64);
            }
        }
    }
    counts
}

/// Resolves a compressed name: `(12) name` defines number 12, and `(12)` refers to it.
fn resolve_name<'a>(names: &mut HashMap<&'a str, String>, text: &'a str) -> String {
    let Some((number, name)) = text.split_once(')') else {
        return text.to_owned();
    };
    if name.trim().is_empty() {
        return names.get(number).cloned().unwrap_or_default();
    }
    let name = remove_hash_and_recursion_level(name.trim());
    names.insert(number, name.clone());
    name
}

/// Removes the parts of a function name that differ between builds and calls: the hash at the end, and the recursion level.
fn remove_hash_and_recursion_level(name: &str) -> String {
    let name = name.split('\'').next().unwrap_or(name);
    match name.rsplit_once("::h") {
        Some((front, hash)) if hash.len() == 16 && hash.bytes().all(|byte| byte.is_ascii_hexdigit()) => {
            front.to_owned()
        }
        _ => name.to_owned(),
    }
}

/// Allocation functions of C and Rust. A call from one of them to another does not count as a further allocation.
const ALLOCATORS: [&str; 14] = [
    "malloc",
    "calloc",
    "realloc",
    "posix_memalign",
    "aligned_alloc",
    "__libc_malloc",
    "__libc_calloc",
    "__libc_realloc",
    "__rustc::__rust_alloc",
    "__rustc::__rust_alloc_zeroed",
    "__rustc::__rust_realloc",
    "__rustc::__rdl_alloc",
    "__rustc::__rdl_alloc_zeroed",
    "__rustc::__rdl_realloc",
];

/// The path of the dumps of a sidecar, without the number at its end.
pub(super) fn dump_path(testbed: &Testbed, side: Side) -> PathBuf {
    testbed.dir.path().join(DUMP_DIR).join(side.name())
}

/// Directory of the dumps, in the directory of the testbed. The proxy's user can write to it.
pub(super) const DUMP_DIR: &str = "callgrind";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_are_exclusive_and_nested_allocator_calls_count_once() {
        let dump = "# callgrind format\nversion: 1\nevents: Ir\npositions: line\n\n\
            ob=(1) /proxy\nfl=(1) a.rs\nfn=(1) a::b::h0123456789abcdef\n0 10\n\
            cfi=(2) malloc.c\ncfn=(2) malloc\ncalls=3 0\n0 300\nfi=(3) b.rs\n0 5\n\n\
            fl=(2)\nfn=(2)\n0 60\ncfn=(3) posix_memalign\ncalls=1 0\n0 7\n\n\
            fn=(3)\n+0 7\n\nfn=(4) a::b'2\n0 1\ncfn=(5) __rustc::__rdl_alloc\ncalls=2 0\n0 9\n\n\
            fn=(5)\n+0 3\ncfn=(2)\ncalls=2 0\n0 6\ntotals: 92\n";
        let counts = parse(dump);
        let functions: Vec<(&str, u64)> = counts.functions.iter().map(|(name, n)| (name.as_str(), *n)).collect();
        assert_eq!(
            functions,
            [
                ("__rustc::__rdl_alloc", 3),
                ("a::b", 16),
                ("malloc", 60),
                ("posix_memalign", 7)
            ]
        );
        let files: Vec<(&str, u64)> = counts.files.iter().map(|(name, n)| (name.as_str(), *n)).collect();
        assert_eq!(files, [("a.rs", 10), ("b.rs", 5), ("malloc.c", 71)]);
        assert_eq!(counts.allocations, [("a::b".to_owned(), 5)].into());
    }
}
