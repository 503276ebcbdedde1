//! The generated pages of `docs/reference` match the code. `./run docs` writes them.

#![allow(clippy::unwrap_used)]

mod chart_values;
mod commands;
mod metrics;

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use clap::CommandFactory as _;
use tulle_core::causes;
use tulle_core::names::{annotation, header, label, variable};
use tulle_proxy::env::reference::{Fallback, Variable, variables};

/// Writes a page if `TULLE_WRITE_DOCS` is set; otherwise fails if its file has another text.
fn check_page(name: &str, text: &str) {
    let path = root().join("docs/reference").join(name);
    if std::env::var_os("TULLE_WRITE_DOCS").is_some() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        return;
    }
    let found = fs::read_to_string(&path).unwrap_or_default();
    let different = text.lines().zip(found.lines()).find(|(wanted, found)| wanted != found);
    assert!(
        found == text,
        "{} is outdated, run ./run docs; first difference: {different:#?}",
        path.display()
    );
}

/// A table of Markdown.
fn table<const N: usize>(header: [&str; N], rows: impl Iterator<Item = [String; N]>) -> String {
    let mut out = format!("| {} |\n|{}\n", header.join(" | "), "---|".repeat(N));
    for row in rows {
        let cells = row.map(|cell| cell.replace('|', "\\|").replace('\n', " "));
        let _ = writeln!(out, "| {} |", cells.join(" | "));
    }
    out
}

/// The start of each generated page.
fn heading(title: &str, source: &str, introduction: &str) -> String {
    format!("# {title}\n\n<!-- Generated from {source}; change that, then run: ./run docs -->\n\n{introduction}\n\n")
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

#[test]
fn causes_of_failures() {
    check_page("errors.md", &causes::markdown());
}

#[test]
fn environment_variables() {
    let row = |variable: Variable| {
        let default = match variable.default {
            Fallback::Required => "required".to_owned(),
            Fallback::Value(value) => format!("`{value}`"),
            Fallback::Text(text) => text.to_owned(),
        };
        [
            format!("`{}`", variable.name),
            variable.values.to_owned(),
            default,
            variable.meaning.to_owned(),
        ]
    };
    let page = heading(
        "Environment variables",
        "proxy/src/env/reference.rs and core/src/names/variable.rs",
        "The injector sets the variables of the proxy from chart values and annotations. An empty variable counts as not set. The proxy reports \
         all invalid values at once and does not start. Variables with the prefix `LINKERD2_PROXY_` are those of Linkerd's proxy; \
         those with `TULLE_` exist only here. The variables of the other programs are [below](#other-programs).",
    ) + &table(
        ["Variable", "Values", "Default", "Meaning"],
        variables().into_iter().map(row),
    ) + "\n## Other programs\n\n"
        + &table(
            ["Variable", "Programs", "Values", "Default", "Meaning"],
            variable::ALL.iter().map(|variable| {
                [
                    format!("`{}`", variable.name),
                    variable.programs.to_owned(),
                    variable.values.to_owned(),
                    variable.default.to_owned(),
                    variable.meaning.to_owned(),
                ]
            }),
        );
    check_page("environment.md", &page);
}

/// The files below a directory that are not tests.
fn rust_files(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let (dirs, files): (Vec<_>, Vec<_>) = entries.partition(|path| path.is_dir());
    let is_tests = |path: &Path| {
        path.file_stem()
            .is_some_and(|stem| stem.to_string_lossy().ends_with("tests"))
    };
    let sources = files
        .into_iter()
        .filter(|path| path.extension().is_some_and(|end| end == "rs"));
    let nested = dirs.iter().filter(|dir| !is_tests(dir)).flat_map(|dir| rust_files(dir));
    sources.filter(|path| !is_tests(path)).chain(nested).collect()
}

/// The code of the programs without its tests: pairs of the path and the text of each file.
fn sources() -> impl Iterator<Item = (PathBuf, String)> {
    let crates = ["core", "proxy", "control", "init", "cli", "bench"].into_iter();
    let files = crates.flat_map(|name| rust_files(&root().join(name).join("src")));
    files.map(|path| {
        let text = fs::read_to_string(&path).unwrap();
        let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
        (path, code.to_owned())
    })
}

#[test]
fn every_variable_that_a_program_reads_by_name_is_declared() {
    let mut undeclared = Vec::new();
    for (path, code) in sources() {
        for call in ["env::var(\"", "env::var_os(\"", " env = \""] {
            let names = code.split(call).skip(1).filter_map(|rest| rest.split('"').next());
            undeclared.extend(names.map(|name| format!("{}: {name}", path.display())));
        }
    }
    // `tulle` reads PATH to find Helm as a shell does. Tests read CI, because they must not be skipped there.
    undeclared.retain(|found| !found.ends_with("cli/src/install/charts.rs: PATH") && !found.ends_with(": CI"));
    assert!(
        undeclared.is_empty(),
        "declare them in core/src/names/variable.rs: {undeclared:#?}"
    );
}

#[test]
fn every_annotation_and_label_that_a_program_names_is_declared() {
    let prefixes = ["linkerd.io/", "tulle.dev/"];
    let mut undeclared = Vec::new();
    for (path, code) in sources() {
        for literal in code.split('"').filter(|text| !text.contains(char::is_whitespace)) {
            let Some((_, name)) = prefixes.iter().find_map(|prefix| literal.split_once(prefix)) else {
                continue;
            };
            let is_api_version = name.starts_with("v1");
            let is_prefix = name.is_empty() || name.ends_with('-');
            let is_declared = annotation::ALL.iter().any(|row| literal.starts_with(row.name))
                || label::ALL.iter().any(|row| literal.starts_with(row.name));
            if !is_api_version && !is_prefix && !is_declared && !NOT_ANNOTATIONS.contains(&literal) {
                undeclared.push(format!("{}: {literal}", path.display()));
            }
        }
    }
    assert!(undeclared.is_empty(), "declare them in core/src/names: {undeclared:#?}");
}

#[test]
fn every_header_that_a_program_names_is_declared() {
    // Of HTTP and gRPC, with their usual meaning.
    let standard = [
        "keep-alive",
        "proxy-connection",
        "grpc-accept-encoding",
        "grpc-encoding",
        "grpc-message",
        "grpc-status",
        "grpc-timeout",
    ];
    let mut undeclared = Vec::new();
    for (path, code) in sources() {
        let names = code.split("HeaderName::from_static(\"").skip(1);
        for name in names.filter_map(|rest| rest.split('"').next()) {
            let is_of_echo_servers = name == "x-replica";
            if !standard.contains(&name) && !is_of_echo_servers && header::ALL.iter().all(|row| row.name != name) {
                undeclared.push(format!("{}: {name}", path.display()));
            }
        }
    }
    assert!(
        undeclared.is_empty(),
        "declare them in core/src/names/header.rs: {undeclared:#?}"
    );
}

/// Other names with the syntax of annotations: the type of a Secret, two controllers in statuses, the scheme of the issuer, and a
/// common misspelling that `tulle check` finds.
const NOT_ANNOTATIONS: [&str; 5] = [
    "mirror.linkerd.io/remote-kubeconfig",
    "linkerd.io/policy-controller",
    "linkerd.io/service-mirror",
    "linkerd.io/tls",
    "linkerd.io/injected",
];

#[test]
fn annotations_and_labels() {
    let mut page = heading(
        "Annotations and labels",
        "core/src/names",
        "Names with `linkerd.io` are those of Linkerd; those with `tulle.dev` exist only here. A value that cannot be read is \
         ignored and reported; if it restricts access, the pod is refused.",
    );
    let annotations = annotation::ALL.iter().map(|annotation| {
        [
            format!("`{}{}`", annotation.name, annotation.placeholder),
            annotation.objects.to_owned(),
            annotation.values.to_owned(),
            annotation.default.to_owned(),
            annotation.meaning.to_owned(),
        ]
    });
    page += "## Annotations\n\n";
    page += &table(["Annotation", "Objects", "Values", "Default", "Meaning"], annotations);
    let labels = label::ALL.iter().map(|label| {
        [
            format!("`{}{}`", label.name, label.placeholder),
            label.objects.to_owned(),
            label.set_by.to_owned(),
            label.meaning.to_owned(),
        ]
    });
    page += "\n## Labels\n\n";
    page += &table(["Label", "Objects", "Set by", "Meaning"], labels);
    check_page("annotations.md", &page);
}

#[test]
fn headers() {
    let rows = header::ALL.iter().map(|header| {
        [
            format!("`{}`", header.name),
            header.direction.to_owned(),
            header.values.to_owned(),
            header.meaning.to_owned(),
        ]
    });
    let page = heading(
        "HTTP headers",
        "core/src/names/header.rs",
        "Headers that proxies set, read or remove.",
    ) + &table(["Header", "Direction", "Values", "Meaning"], rows);
    check_page("headers.md", &page);
}

#[test]
fn flags() {
    let commands = [
        tulle_cli::app::Cli::command().name("tulle"),
        tulle_control::cmd::Command::command().name("tulle-control"),
        tulle_init::cli::Cli::command().name("tulle-init"),
        tulle_proxy::linkerd_await::Args::command(),
        tulle_bench::cli::Args::command(),
    ];
    let mut page = heading(
        "Command-line flags",
        "the argument definitions of each program",
        "All programs print this help with `--help`. `tulle-proxy` has no flags: it is configured by \
         [environment variables](environment.md).",
    );
    for command in commands {
        // The version is not part of the page, so that a release does not change it.
        let markdown = clap_markdown::help_markdown_command_custom(
            &command,
            &clap_markdown::MarkdownOptions::new()
                .show_footer(false)
                .show_table_of_contents(false),
        );
        // The first heading and its sentence are the same for each program.
        let (_, help) = markdown.split_once("\n## ").unwrap();
        page += &format!("## {}\n\n", help.trim_end()).replace("\n###### ", "\n");
    }
    check_page("flags.md", &page);
}
