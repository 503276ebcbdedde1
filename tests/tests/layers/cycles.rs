//! No import cycles: no two files of a crate import each other, directly or through other files.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::path::Path;

use super::imports::imports;
use super::{CRATES, files_below, module_path, root};

/// The files of a crate by their path below `src`, each with the files it imports and the line of the import.
type Graph = BTreeMap<String, BTreeMap<String, String>>;

#[test]
fn no_files_import_each_other_in_a_cycle() {
    let crates = CRATES.iter().map(|(name, _)| root().join(name));
    let sources = crates.clone().map(|dir| dir.join("src"));
    // Each directory of tests with a `main.rs` is a crate, too.
    let tests = crates.map(|dir| dir.join("tests")).filter(|dir| dir.exists());
    let tests = tests.flat_map(|dir| files_below(&dir));
    let tests = tests.filter_map(|file| Some(file.parent()?.to_owned()).filter(|_| file.ends_with("main.rs")));
    let found: Vec<String> = sources.chain(tests).flat_map(|dir| cycles(&graph(&dir))).collect();
    assert!(found.is_empty(), "{} cycles:\n{}", found.len(), found.join("\n"));
}

fn graph(src: &Path) -> Graph {
    let files = files_below(src);
    let sources = files
        .iter()
        .filter(|file| file.extension().is_some_and(|extension| extension == "rs"));
    let sources = sources.map(|file| {
        let name = file
            .strip_prefix(src)
            .expect("the file is below the directory")
            .display()
            .to_string();
        (name, fs::read_to_string(file).expect("sources are readable UTF-8"))
    });
    graph_from_sources(&sources.collect())
}

fn graph_from_sources(sources: &BTreeMap<String, String>) -> Graph {
    let modules: BTreeMap<Vec<String>, &String> = sources
        .keys()
        .map(|name| (module_path(Path::new(name)), name))
        .collect();
    let mut graph = Graph::new();
    for (name, source) in sources {
        let imported = graph.entry(name.clone()).or_default();
        for import in imports(source, &module_path(Path::new(name))) {
            // The longest prefix of the path that is a module; the rest is an item in it.
            let target = (0..=import.path.len())
                .rev()
                .find_map(|n| modules.get(&import.path[..n]));
            if let Some(target) = target.filter(|target| **target != name && !import.is_test) {
                let path = import.path.join("::");
                imported
                    .entry((*target).clone())
                    .or_insert_with(|| format!("{name}:{} imports {path}", import.line));
            }
        }
    }
    graph
}

/// The shortest cycle through each file that is in one, except those that share a file with a cycle already listed.
fn cycles(graph: &Graph) -> Vec<String> {
    let mut reported = BTreeSet::new();
    let mut all = Vec::new();
    for start in graph.keys() {
        let Some(files) =
            shortest_cycle(graph, start).filter(|files| !files.iter().any(|file| reported.contains(file)))
        else {
            continue;
        };
        let steps = files.iter().zip(files.iter().cycle().skip(1));
        let steps = steps.map(|(file, next)| format!("  {} from {next}", graph[file.as_str()][next.as_str()]));
        all.push(format!(
            "cycle of {}:\n{}",
            files.len(),
            steps.collect::<Vec<_>>().join("\n")
        ));
        reported.extend(files);
    }
    all
}

/// The shortest path along imports from a file back to itself.
fn shortest_cycle(graph: &Graph, start: &String) -> Option<Vec<String>> {
    let mut came_from: BTreeMap<&String, &String> = BTreeMap::new();
    let mut waiting = VecDeque::from([start]);
    while let Some(file) = waiting.pop_front() {
        for next in graph[file].keys() {
            if next == start {
                let mut files = vec![file.clone()];
                let mut at = file;
                while let Some(before) = came_from.get(at) {
                    files.insert(0, (*before).clone());
                    at = before;
                }
                return Some(files);
            }
            if !came_from.contains_key(next) {
                came_from.insert(next, file);
                waiting.push_back(next);
            }
        }
    }
    None
}

#[test]
fn cycles_are_found_and_test_imports_are_ignored() {
    let sources = |b: &str| {
        let files = [
            ("lib.rs", "mod a; mod b; mod c;"),
            ("a/mod.rs", "mod d; use d::D;"),
            ("a/d.rs", "use crate::b::B;"),
            ("b.rs", b),
            ("c.rs", "#[cfg(test)] mod tests { use crate::a::A; } use crate::b::B;"),
        ];
        graph_from_sources(&files.map(|(name, source)| (name.to_owned(), source.to_owned())).into())
    };
    assert_eq!(cycles(&sources("use crate::c::C;")).len(), 1);
    assert_eq!(cycles(&sources("")), [""; 0]);
    assert_eq!(
        cycles(&sources("\nuse crate::a::A;")),
        [
            "cycle of 3:\n  a/d.rs:1 imports b::B from b.rs\n  b.rs:2 imports a::A from a/mod.rs\n  a/mod.rs:1 imports a::d::D from a/d.rs"
        ]
    );
}
