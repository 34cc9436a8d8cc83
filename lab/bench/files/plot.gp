# Draws what report.go has written beside this file into SVG files in the folder `out`.
set encoding utf8
set datafile separator "\t"
set terminal svg size 760,420 font "sans-serif,13" background "#ffffff"
set border 3 lc rgb "#444444"
set tics nomirror textcolor rgb "#444444"
set grid y lc rgb "#dddddd"
muster = "#1f6feb"
byhand = "#8a8a8a"

set xlabel "round"
set ylabel "seconds until the node is Ready"
set yrange [0:*]
set key bottom right
set xtics 1
set output out."/init.svg"
set title "Init: the first machine"
plot "samples.tsv" using 1:2 with linespoints pt 7 lc rgb muster title "Muster", \
     "samples.tsv" using 1:4 with linespoints pt 5 lc rgb byhand title "kubeadm by hand"
set output out."/join.svg"
set title "Join: a worker"
plot "samples.tsv" using 1:3 with linespoints pt 7 lc rgb muster title "Muster", \
     "samples.tsv" using 1:5 with linespoints pt 5 lc rgb byhand title "kubeadm by hand"

set terminal svg size 760,640 font "sans-serif,13" background "#ffffff"
set output out."/stages.svg"
set title "Where Muster's time goes: medians, minimum to maximum"
unset key
unset ylabel
set xlabel "seconds (logarithmic)"
set logscale x
set xrange [0.0005:*]
set grid x lc rgb "#dddddd"
unset grid
set grid x lc rgb "#dddddd"
set xtics autofreq
stats "stages.tsv" using 2 nooutput
n = STATS_records
set yrange [n - 0.5 : -0.5]
set style fill solid 0.8 noborder
set boxwidth 0.6
plot "stages.tsv" using (($2 > 0.0005 ? $2 : 0.0005)/2):0:(0.0005):($2 > 0.0005 ? $2 : 0.0005):($0-0.3):($0+0.3):ytic(1) with boxxyerror lc rgb muster, \
     "stages.tsv" using 2:0:($3 > 0.0005 ? $3 : 0.0005):($4 > 0.0005 ? $4 : 0.0005) with xerrorbars pt 0 lc rgb "#333333"
