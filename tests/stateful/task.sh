# The task `stateful` of `run`, the files of the images with real servers for `tests/tests/stateful`, and the brokers of the
# benchmark. `run` sources this file and defines the other functions and variables.
# shellcheck shell=bash disable=SC2154

# Programs of both images: a shell and what its scripts call.
readonly shell_packages=(bash busybox coreutils curl findutils libc-bin)
readonly database_packages=(postgresql mariadb-server-core mariadb-client-core redis-server redis-sentinel redis-tools memcached)
readonly broker_packages=(rabbitmq-server amqp-tools default-jre-headless etcd-server etcd-client mosquitto mosquitto-clients
  slapd ldap-utils openssh-server openssh-client opensmtpd vsftpd)
# Dependencies that only the installation, or optional features, of these packages need.
readonly left_out='^(adduser|base-files|cron.*|debconf|dpkg|fonts-.*|gcc-.*|init-system-helpers|lib(llvm|perl|python|z3-).*|locales'
readonly also_left_out='|libc-l10n|logrotate|lsb-base|passwd|perl.*|postgresql-common|python3.*|ssl-cert|tar|ucf|usrmerge|util-linux.*)='
readonly nats_server=github.com/nats-io/nats-server/v2@v2.15.3
readonly nats_client=github.com/nats-io/natscli/nats@v0.5.1

# Runs all servers and scenes, and prints a table of their results.
stateful() {
  need_brokers
  build_for_tests
  TULLE_TEST_FULL=1 cargo nextest run --profile full -p tulle-tests --test stateful --run-ignored all --no-capture "$@"
}

need_databases() {
  need_root databases "" "${shell_packages[@]}" "${database_packages[@]}"
}

need_nats() {
  need_go_tool "$nats_server" nats-server
  need_go_tool "$nats_client" nats
}

# Kafka without an image, for the benchmark.
need_kafka() {
  local pom
  pom="$(<tests/stateful/pom.xml)"
  [[ "$(cat "$cache/.kafka" 2>/dev/null)" == "$pom" ]] && return
  say "downloading Kafka"
  command -v java >/dev/null || need_packages default-jre-headless
  command -v mvn >/dev/null || need_packages maven
  rm -rf "$KAFKA_JARS"
  copy_jars tests/stateful/pom.xml "$KAFKA_JARS"
  echo "$pom" >"$cache/.kafka"
}

need_brokers() {
  need mvn
  need_nats
  need_root brokers add_brokers "${shell_packages[@]}" "${broker_packages[@]}"
}

# need_root NAME ADD PACKAGE...: lays out the files of an image in $cache/servers/NAME from Debian packages and what they depend on,
# and calls ADD with this directory. Does nothing if the same versions are there already.
need_root() {
  local name="$1" add="$2" root="$cache/servers/$1" stamp="$cache/servers/.$1" versions
  shift 2
  versions="$(versions_of "$@")"
  [[ "$(cat "$stamp" 2>/dev/null)" == "$versions" ]] && return
  say "laying out the files of the image $name"
  as_root apt-get -qq -o DPkg::Lock::Timeout=300 update
  versions="$(versions_of "$@")"
  rm -rf "$root.new"
  mkdir -p "$root.new"
  unpack "$root.new" "$versions"
  if [[ -n "$add" ]]; then "$add" "$root.new"; fi
  rm -rf "$root"
  mv "$root.new" "$root"
  echo "$versions" >"$stamp"
}

# Prints a hash of the files beside this one, and the versions of packages and of all that they depend on, as `apt-get` would install
# them on a machine without packages.
versions_of() {
  find tests/stateful -type f -print0 | sort -z | xargs -0 cat | sha256sum
  apt-get -qq --simulate --no-install-recommends -o Debug::NoLocking=1 -o Dir::State::status=/dev/null install "$@" |
    sed -n 's/^Inst \([^ ]*\) (\([^ ]*\) .*/\1=\2/p' | grep -vE "$left_out$also_left_out" | sort
}

# unpack ROOT VERSIONS: writes the files of Debian packages to ROOT, without the scripts of their installation.
unpack() {
  local root="$1" downloads dir file program versions
  mapfile -t versions < <(grep '=' <<<"$2")
  downloads="$(mktemp -d)"
  chmod 755 "$downloads" # apt-get downloads as another user
  (cd "$downloads" && apt-get -qq -o APT::Sandbox::User= download "${versions[@]}")
  mkdir -p "$root/usr"
  for dir in bin sbin lib lib64; do
    mkdir "$root/usr/$dir"
    ln -s "usr/$dir" "$root/$dir"
  done
  for file in "$downloads"/*.deb; do
    # Some packages have files in /bin and /lib, which are links.
    dpkg-deb --fsys-tarfile "$file" | tar -x --keep-directory-symlink --no-same-owner --no-same-permissions -C "$root"
  done
  rm -r "$downloads" "$root"/usr/share/{doc,info,locale,man}
  rm -rf "$root"/usr/lib/postgresql/*/lib/bitcode # for its compiler, whose library is left out
  mkdir -p "$root"/var/{log,spool,tmp}
  ln -s /run "$root/var/run"
  for program in "$root"/usr/lib/{postgresql,jvm}/*/bin/*; do
    if [[ -e "$program" ]]; then ln -sf "${program#"$root"}" "$root/usr/bin"; fi
  done
  for program in $(busybox --list); do
    if [[ ! -e "$root/usr/bin/$program" && ! -e "$root/usr/sbin/$program" ]]; then ln -s busybox "$root/usr/bin/$program"; fi
  done
  cp "$(command -v flock)" "$root/usr/bin" # of util-linux, whose other programs are left out
  cp tests/stateful/etc/* "$root/etc"
}

# Kafka, ZooKeeper and Cassandra from Maven, NATS from the Go proxy.
add_brokers() {
  copy_jars tests/stateful/pom.xml "$1/usr/share/brokers"
  copy_jars tests/stateful/cassandra.xml "$1/usr/share/cassandra"
  cp "$cache/bin/nats-server" "$cache/bin/nats" "$1/usr/bin"
  CGO_ENABLED=0 go build -C tests/stateful/writer -ldflags '-s -w' -o "$1/usr/bin/" . ./cql
}

copy_jars() {
  mvn --quiet --batch-mode --file "$1" dependency:copy-dependencies "-DoutputDirectory=$2"
}
